// The models of a server with several: which one answers, what each takes, and who loads or unloads them.

import { getJson, postJson } from "./api.js";
import { made } from "./markdown.js";
import { store, stored } from "./store.js";

const EVERY_MS = 1000;

function size(bytes) {
  for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20]]) {
    if (bytes >= one) return `${(bytes / one).toLocaleString("en", { maximumFractionDigits: 1 })} ${unit}`;
  }
  return `${Math.round(bytes / 1024)} KiB`;
}

export class Models {
  // `parts`: the page's elements {name, choice, select, tab, rows, total, problem, attach}; `key`: returns the API key.
  constructor(parts, key) {
    this.parts = parts;
    this.key = key;
    this.chosen = stored("model");
    this.data = [];
    parts.select.addEventListener("change", () => {
      this.chosen = parts.select.value;
      store("model", this.chosen);
      this.showAttach();
    });
    this.run();
  }

  // What a request says about its model: nothing to a server with a single one.
  get options() {
    return this.chosen === null ? {} : { model: this.chosen };
  }

  get query() {
    return this.chosen === null ? "" : `&model=${encodeURIComponent(this.chosen)}`;
  }

  // Whether the chosen model takes images; true where only its load will tell.
  get takesImages() {
    const one = this.data.find(({ id }) => this.chosen === null || id === this.chosen);
    return one !== undefined && (one.supports_images ?? one.status !== undefined);
  }

  showAttach() {
    this.parts.attach.hidden = !this.takesImages;
  }

  async run() {
    await this.refresh();
    for (;;) {
      await new Promise((done) => setTimeout(done, EVERY_MS));
      if (!document.hidden && this.parts.tab.getAttribute("aria-selected") === "true") await this.refresh();
    }
  }

  async refresh() {
    const { name, choice, tab, problem } = this.parts;
    let found;
    try {
      found = await getJson("v1/models", this.key());
    } catch (error) {
      name.textContent = error.message;
      problem.textContent = error.message;
      return;
    }
    problem.textContent = "";
    const several = found.data.some((one) => one.status);
    choice.hidden = tab.hidden = !several;
    name.hidden = several;
    name.textContent = found.data[0].id;
    this.data = found.data;
    if (!several) {
      this.chosen = null;
      this.showAttach();
      return;
    }
    const named = found.data.filter((one) => one.root === undefined || one.parent !== undefined);  // no aliases
    this.choices(named.filter((one) => one.capabilities?.[0] !== "embedding").map((one) => one.id));
    this.show(found);
    this.showAttach();
  }

  choices(ids) {
    const { select } = this.parts;
    if (!ids.includes(this.chosen)) this.chosen = ids[0] ?? null;
    if ([...select.options].map((one) => one.value).join("\n") !== ids.join("\n")) {
      select.replaceChildren(...ids.map((id) => Object.assign(document.createElement("option"), { value: id, textContent: id })));
    }
    if (document.activeElement !== select) select.value = this.chosen ?? "";
  }

  show({ data, memory }) {
    const { rows, total } = this.parts;
    const focused = document.activeElement?.dataset?.model;  // its row is made again
    rows.replaceChildren(...data.filter((one) => one.root === undefined).map((one) => this.row(one)));
    if (focused !== undefined) [...rows.querySelectorAll("button")].find((one) => one.dataset.model === focused)?.focus();
    const budget = memory.budget_bytes === null ? "" : ` of ${size(memory.budget_bytes)}`;
    const gpus = memory.gpu_budget_bytes === undefined ? "" : `; GPUs: ${size(memory.gpu_used_bytes)} of ${size(memory.gpu_budget_bytes)}`;
    total.textContent = `Memory: ${size(memory.used_bytes)}${budget}${gpus}`;
  }

  row(one) {
    const { value, progress, error } = one.status;
    const row = document.createElement("tr");
    const state = value === "loading" ? `loading, ${Math.round(100 * progress)} %` : value;
    const head = made("th", "", one.id);
    head.scope = "row";
    const isThere = value === "loaded" || value === "loading";
    const button = made("button", "", isThere ? "Unload" : "Load");
    button.type = "button";
    button.dataset.model = one.id;
    button.setAttribute("aria-label", `${button.textContent} ${one.id}`);
    button.addEventListener("click", () => this.change(isThere ? "unload" : "load", one.id));
    const last = document.createElement("td");
    last.append(button);
    row.append(
      head,
      made("td", error ? "error" : "", error ? `${state}: ${error}` : state + (one.pinned ? ", pinned" : "")),
      made("td", "number", one.memory_bytes === undefined ? "" : size(one.memory_bytes)),
      made("td", "number", String(one.n_requests)),
      last,
    );
    return row;
  }

  async change(what, model) {
    try {
      await postJson(`models/${what}`, { model }, this.key());
    } catch (error) {
      this.parts.problem.textContent = error.message;
      return;
    }
    await this.refresh();
  }
}
