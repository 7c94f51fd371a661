// A conversation: its messages on the page, in the browser's store and in requests.

import { plain, withTools } from "./answers.js";
import { isImage, pictures } from "./images.js";
import { Markdown, appendText, made } from "./markdown.js";
import { store, stored } from "./store.js";
import { isCall, showCall } from "./tools.js";

const NAME = "conversation";  // in the store

// The messages that are sent: those that were answered, and the last one. Calls of tools are an answer, too.
function answered(messages) {
  const isThere = ({ content, items }) => content || items?.some(isCall);
  return messages.filter((one, i) => (
    one.role === "user" ? i === messages.length - 1 || isThere(messages[i + 1]) : isThere(one)
  ));
}

// The questions of an answer that the reader has not decided.
function undecided({ items, approvals }) {
  return (items ?? []).filter(({ type, id }) => type === "mcp_approval_request" && !approvals?.some((one) => one.id === id));
}

// Whether an entry of the store is a message as this page writes it.
function isMessage(one) {
  return (one?.role === "user" || one?.role === "assistant") && typeof one.content === "string"
    && (one.images === undefined || (Array.isArray(one.images) && one.images.every(isImage)))
    && (one.items === undefined || (Array.isArray(one.items) && one.items.every((item) => typeof item?.type === "string")));
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
    this.calls = made("div", "calls");
    this.text = made("div", "markdown");
    this.foot = made("div", "foot");
    this.facts = made("span", "facts");
    this.foot.append(this.facts);
    this.box.append(this.reasoning, this.calls, this.text, this.foot);
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

  // Shows a call, in place of what was shown of it before; `decide`: see showCall.
  call(item, decide) {
    const shown = showCall(item, decide, this.message.approvals?.find((one) => one.id === item.id)?.approve);
    shown.dataset.id = item.id;
    const before = [...this.calls.children].find((one) => one.dataset.id === item.id);
    if (before) before.replaceWith(shown);
    else this.calls.append(shown);
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
  // `ask`: {options, system, key, tools, run, first} of the page; `note` shows a line under the conversation.
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
    const answer = this.showAnswer(message);
    this.showCalls(answer, isLast);
    answer.end(isLast ? () => this.again() : null);
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

  // Shows the calls of an answer; the last one's questions wait for a decision.
  showCalls(answer, isLast) {
    const { message } = answer;
    const open = undecided(message);
    for (const item of (message.items ?? []).filter(isCall)) {
      answer.call(item, isLast && open.includes(item) ? (how) => this.decide(answer, item, how) : null);
    }
  }

  // What the reader says to a call. When all of an answer are decided, the model continues.
  async decide(answer, item, how) {
    const { message } = answer;
    if (this.ask.isRunning() || this.messages.at(-1) !== message) return;
    if (how === "always") this.ask.tools.allow(item);
    (message.approvals ??= []).push({ id: item.id, approve: how !== "no" });
    answer.call(item, null);
    this.save();
    if (!undecided(message).length) await this.answer();
  }

  save() {
    const isKept = store(NAME, this.messages);
    if (!isKept && this.messages.length) this.note("The browser does not keep this conversation: a reload will end it.");
  }

  clear() {
    this.messages = [];
    this.ask.tools.clear();
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
    const before = this.answers.get([...this.log.querySelectorAll(".message.assistant")].at(-1));
    if (before) this.showCalls(before, false);  // a question is past
    this.log.querySelectorAll("button.again").forEach((button) => button.remove());
    const options = ask.options();
    const sent = [...ask.system(), ...answered(messages)];
    const tools = ask.tools.asked;
    const message = { role: "assistant", content: "", reasoning: "" };
    messages.push(message);
    const answer = this.showAnswer(message);
    answer.facts.textContent = "waiting for the first token";
    this.scroller.toEnd();
    this.save();
    const began = performance.now();
    let first = null, n = null, reason = null, ended = "", written = 0;
    this.log.setAttribute("aria-busy", "true");
    await ask.run(async (signal) => {
      try {
        const parts = tools.length ? withTools(tools, options, sent, ask.key(), signal) : plain(options, sent, ask.key(), signal);
        for await (const part of parts) {
          n = part.n_tokens ?? n;
          reason = part.reason ?? reason;
          if (part.progress && first === null) {
            const { processed, total } = part.progress;
            answer.facts.textContent = `reading the prompt: ${Math.floor(100 * processed / total)} % of ${total} tokens`;
          }
          if (part.item) {
            if (part.isDone) {
              (message.items ??= []).push(part.item);
              written = message.content.length;
            }
            if (isCall(part.item)) this.scroller.keep(() => answer.call(part.item, null));
          }
          const content = part.content ?? "", reasoning = part.reasoning ?? "";
          if (!content && !reasoning) continue;
          if (first === null) {
            first = performance.now();
            ask.first(first - began);
            answer.facts.textContent = "";
          }
          answer.add(content, reasoning);
        }
      } catch (error) {
        if (error.name === "AbortError") ended = "stopped";
        else if (!this.isLeaving) message.error = error.message;
      }
    });
    if (this.isLeaving) return;
    const facts = [];
    if (n !== null && first !== null) {
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
    if (message.items) message.rest = message.content.slice(written).trim();
    this.scroller.keep(() => {
      this.showCalls(answer, true);
      answer.end(() => this.again());
    });
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
