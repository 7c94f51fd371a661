// Images that go with the next message: chosen, pasted or dropped, shown as thumbnails until they are sent.

import { made } from "./markdown.js";

const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];  // that the server decodes
const KEPT_BYTES = 2 ** 20;  // larger files, and other types, are drawn again
const MOST_SIDE = 1536;
const MOST = 16;

export function isImage(url) {
  return typeof url === "string" && url.startsWith("data:image/");
}

// The pictures of a message. `remove`: called with the place of one whose button is pressed.
export function pictures(urls, remove) {
  const box = made("div", "pictures");
  urls.forEach((url, i) => {
    const frame = made("span", "picture");
    const name = `Image ${i + 1}`;
    frame.append(Object.assign(document.createElement("img"), { src: url, alt: name }));
    if (remove) {
      const button = Object.assign(made("button", "remove", "×"), { type: "button", title: "Remove the image" });
      button.setAttribute("aria-label", `Remove ${name}`);
      button.addEventListener("click", () => remove(i));
      frame.append(button);
    }
    box.append(frame);
  });
  return box;
}

function read(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

// The data URL of a file, made smaller if need be. Throws if the browser cannot decode it.
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  try {
    const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
    if (KEPT_TYPES.includes(file.type) && file.size <= KEPT_BYTES) return await read(file);
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    const to = canvas.getContext("2d");
    to.fillStyle = "#fff";  // JPEG has no transparency
    to.fillRect(0, 0, canvas.width, canvas.height);
    to.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", 0.9);
  } finally {
    bitmap.close();
  }
}

export class Images {
  // `parts`: the page's elements {area, shown, button, input, message}; `takes`: whether the model takes images; `note`
  // shows a line.
  constructor({ area, shown, button, input, message }, takes, note) {
    Object.assign(this, { shown, button, message, takes, note });
    this.urls = [];
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.add([...input.files]);
      input.value = "";
      message.focus();
    });
    message.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    const isOfFiles = (event) => event.dataTransfer?.types.includes("Files");
    for (const kind of ["dragenter", "dragover"]) {
      area.addEventListener(kind, (event) => {
        if (!isOfFiles(event)) return;
        event.preventDefault();
        area.classList.add("dropping");
      });
    }
    area.addEventListener("dragleave", (event) => {
      if (!area.contains(event.relatedTarget)) area.classList.remove("dropping");
    });
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!isOfFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    this.note("");
    if (!this.takes()) return this.note("This model takes no images.");
    for (const file of files) {
      if (this.urls.length >= MOST) return this.note(`A message has at most ${MOST} images.`);
      try {
        this.urls.push(await dataUrl(file));
      } catch {
        this.note(`${file.name} is no image that this browser can read.`);
      }
    }
    this.show();
  }

  // The images, which are then gone.
  take() {
    const { urls } = this;
    this.urls = [];
    this.show();
    return urls;
  }

  show() {
    this.shown.replaceChildren();
    if (this.urls.length) this.shown.append(pictures(this.urls, (i) => this.remove(i)));
    this.message.required = this.urls.length === 0;
  }

  remove(i) {
    this.urls.splice(i, 1);
    this.show();
    const left = this.shown.querySelectorAll("button");
    (left[Math.min(i, left.length - 1)] ?? this.message).focus();
  }
}
