// A conversation: its messages on the page, in the browser's store and in requests.

import { events } from "./api.js";
import { isImage, pictures } from "./images.js";
import { Markdown, appendText, made } from "./markdown.js";
import { store, stored } from "./store.js";

const NAME = "conversation";  // in the store

// The messages that are sent: those that were answered, and the last one.
function answered(messages) {
  return messages.filter((one, i) => (
    one.role === "user" ? i === messages.length - 1 || messages[i + 1].content : one.content
  )).map(({ role, content, images }) => ({ role, content: images?.length ? parts(content, images) : content }));
}

function parts(text, images) {
  const shown = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

// Whether an entry of the store is a message as this page writes it.
function isMessage(one) {
  return (one?.role === "user" || one?.role === "assistant") && typeof one.content === "string"
    && (one.images === undefined || (Array.isArray(one.images) && one.images.every(isImage)));
}

function duration(ms) {
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${Math.round(ms / 1000)} s`;
}

// An answer on the page. Text is shown once a frame; if that takes long, less often.
class Answer {
  constructor(message, scroller) {
    this.message = message;
    this.scroller = scroller;
    this.box = made("div", "message assistant");
    this.reasoning = made("details", "reasoning");
    this.reasoning.hidden = true;
    this.summary = made("summary", "", "Reasoning");
    this.thoughts = made("div", "thoughts");
    this.reasoning.append(this.summary, this.thoughts);
    this.text = made("div", "markdown");
    this.foot = made("div", "foot");
    this.facts = made("span", "facts");
    this.foot.append(this.facts);
    this.box.append(this.reasoning, this.text, this.foot);
    this.markdown = new Markdown(this.text);
    this.shown = { content: 0, reasoning: 0 };
    this.isWaiting = false;
  }

  add(content, reasoning) {
    this.message.content += content;
    this.message.reasoning += reasoning;
    if (!this.isWaiting) {
      this.isWaiting = true;
      requestAnimationFrame(() => this.frame());
    }
  }

  frame() {
    const began = performance.now();
    this.scroller.keep(() => this.show());
    const took = performance.now() - began;
    if (took < 8) this.isWaiting = false;
    else setTimeout(() => requestAnimationFrame(() => this.frame()), 4 * took);
  }

  show() {
    const { message, shown } = this;
    if (message.reasoning.length > shown.reasoning) {
      this.reasoning.hidden = false;
      appendText(this.thoughts, message.reasoning.slice(shown.reasoning));
      shown.reasoning = message.reasoning.length;
      this.summary.textContent = message.content ? "Reasoning" : "Reasoning…";
    }
    if (message.content.length > shown.content) {
      if (shown.content === 0) this.summary.textContent = "Reasoning";
      this.markdown.write(message.content.slice(shown.content));
      shown.content = message.content.length;
    }
  }

  // Shows all of the answer, and what is to be said of it. `again`: asks once more, after an error.
  end(again) {
    this.show();
    this.markdown.end();
    this.summary.textContent = "Reasoning";
    const { content, facts, error } = this.message;
    this.facts.textContent = facts ?? "";
    if (content) {
      const copy = made("button", "copy", "Copy");
      copy.type = "button";
      copy.title = "Copy the answer as Markdown";
      this.foot.append(copy);
    }
    if (!error) return;
    this.box.classList.add("failed");
    const line = made("p", "error", error);
    line.setAttribute("role", "alert");
    if (again) {
      const button = made("button", "again", "Try again");
      button.type = "button";
      button.addEventListener("click", again);
      line.append(" ", button);
    }
    this.foot.before(line);
  }
}

// Keeps the end of the conversation in view, unless the reader has scrolled up.
class Scroller {
  constructor(log, latest) {
    this.log = log;
    this.latest = latest;
    this.follows = true;
    this.top = 0;
    log.addEventListener("scroll", () => this.scrolled(), { passive: true });
    latest.addEventListener("click", () => { this.toEnd(); log.focus({ preventScroll: true }); });
    new ResizeObserver(() => this.keep(() => {})).observe(log);
  }

  below() {  // pixels of the conversation below what is seen
    const { log } = this;
    return log.scrollHeight - log.scrollTop - log.clientHeight;
  }

  scrolled() {
    const below = this.below(), isUp = this.log.scrollTop < this.top;
    this.top = this.log.scrollTop;
    if (below < 2 || (below < 24 && !isUp)) this.follows = true;
    else if (isUp) this.follows = false;
    this.latest.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.latest.hidden = true;
    this.log.scrollTop = this.log.scrollHeight;
    this.top = this.log.scrollTop;
  }

  keep(change) {
    this.scrolled();  // the reader may have scrolled since the last event
    change();
    if (this.follows) this.toEnd();
    else this.latest.hidden = this.below() < 2;
  }
}

export class Chat {
  // `ask`: {options, system, key, run, first} of the page; `note` shows a line under the conversation.
  constructor(log, latest, ask, note) {
    this.log = log;
    this.ask = ask;
    this.note = note;
    this.scroller = new Scroller(log, latest);
    this.answers = new WeakMap();  // the answer of a box
    log.addEventListener("click", (event) => this.copy(event.target.closest("button.copy")));
    this.isLeaving = false;  // a reload ends the running request, which is no error then
    window.addEventListener("beforeunload", () => {
      this.isLeaving = true;
      setTimeout(() => { this.isLeaving = false; }, 1000);
    });
    window.addEventListener("pagehide", () => this.save());
    const messages = stored(NAME);
    this.messages = Array.isArray(messages) && messages.every(isMessage) ? messages : [];
    this.welcome();
    this.messages.forEach((message, i) => this.restore(message, i === this.messages.length - 1));
    this.scroller.toEnd();
  }

  restore(message, isLast) {
    if (message.role === "user") return this.showUser(message);
    message.reasoning ??= "";
    if (message.facts === undefined) {
      if (message.content) message.facts = "interrupted by a reload";
      else message.error ??= "The page was reloaded before the answer began.";
    }
    this.showAnswer(message).end(isLast ? () => this.again() : null);
  }

  welcome() {
    if (this.messages.length === 0) {
      this.log.replaceChildren(made("p", "empty", "Ask the model something. Answers stream as they are generated."));
    } else this.log.querySelector(".empty")?.remove();
  }

  showUser({ content, images }) {
    const box = made("div", "message user");
    if (images?.length) box.append(pictures(images));
    box.append(content);
    this.log.append(box);
  }

  showAnswer(message) {
    const answer = new Answer(message, this.scroller);
    this.log.append(answer.box);
    this.answers.set(answer.box, answer);
    return answer;
  }

  save() {
    const isKept = store(NAME, this.messages);
    if (!isKept && this.messages.length) this.note("The browser does not keep this conversation: a reload will end it.");
  }

  clear() {
    this.messages = [];
    this.save();
    this.note("");
    this.welcome();
  }

  async send(text, images = []) {
    this.note("");
    this.messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
    this.welcome();
    this.showUser(this.messages.at(-1));
    await this.answer();
  }

  again() {
    if (this.ask.isRunning()) return;
    this.messages.pop();
    this.log.lastElementChild.remove();
    this.answer();
  }

  async answer() {
    const { messages, ask } = this;
    this.log.querySelectorAll("button.again").forEach((button) => button.remove());
    const options = ask.options();
    const sent = [...ask.system(), ...answered(messages)];
    const body = { ...options, truncation: "auto", return_progress: true, messages: sent };
    const message = { role: "assistant", content: "", reasoning: "" };
    messages.push(message);
    const answer = this.showAnswer(message);
    answer.facts.textContent = "waiting for the first token";
    this.scroller.toEnd();
    this.save();
    const began = performance.now();
    let first = null, usage = null, reason = null, ended = "";
    this.log.setAttribute("aria-busy", "true");
    await ask.run(async (signal) => {
      try {
        for await (const event of events("v1/chat/completions", body, ask.key(), signal)) {
          usage = event.usage ?? usage;
          const progress = event.prompt_progress;
          if (progress && first === null) {
            const percent = Math.floor(100 * progress.processed / progress.total);
            answer.facts.textContent = `reading the prompt: ${percent} % of ${progress.total} tokens`;
          }
          for (const { delta, finish_reason } of event.choices) {
            reason = finish_reason ?? reason;
            const content = delta.content ?? "", reasoning = delta.reasoning_content ?? "";
            if (!content && !reasoning) continue;
            if (first === null) {
              first = performance.now();
              ask.first(first - began);
              answer.facts.textContent = "";
            }
            answer.add(content, reasoning);
          }
        }
      } catch (error) {
        if (error.name === "AbortError") ended = "stopped";
        else if (!this.isLeaving) message.error = error.message;
      }
    });
    if (this.isLeaving) return;
    const facts = [];
    const n = usage?.completion_tokens;
    if (usage && first !== null) {
      const seconds = (performance.now() - first) / 1000;
      facts.push(`${n} ${n === 1 ? "token" : "tokens"}`);
      const rate = n / seconds;
      if (seconds > 0 && n > 1) facts.push(`${rate.toFixed(rate < 9.95 ? 1 : 0)} tokens/s`);
      facts.push(`first after ${duration(first - began)}`);
    }
    if (reason === "length") {
      const isLimit = n === options.max_tokens;
      ended = isLimit ? `ended by the limit of ${n} tokens (see Settings)` : "ended by the context: it is full";
    }
    if (ended) facts.push(ended);
    message.facts = facts.join(" · ");
    this.scroller.keep(() => answer.end(() => this.again()));
    this.log.setAttribute("aria-busy", "false");
    if (this.messages === messages) this.save();
  }

  async copy(button) {
    if (!button) return;
    const code = button.closest(".code")?.querySelector("code");
    const answer = this.answers.get(button.closest(".message"));
    const isCopied = await copied(code ? code.textContent : answer.message.content);
    button.textContent = isCopied ? "Copied" : "Not copied";
    this.note(isCopied ? "" : "The browser does not let this page write to the clipboard.");
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }
}

// navigator.clipboard is missing where the page comes from another machine over plain HTTP.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const area = made("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}
