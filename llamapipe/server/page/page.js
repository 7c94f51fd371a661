// The page: a chat, one prompt in several streams, and the engine's timeline.

import { events, getJson } from "./api.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const key = () => $("key").value.trim();
const timeline = new Timeline($("timeline"), $("figures"), key);
let running = null;  // the AbortController of the request that is running

function options() {
  const seed = $("seed").value;
  return {
    temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    stream_options: { include_usage: true },
  };
}

function system() {
  const text = $("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function made(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

// ---- one request at a time
async function run(buttons, work) {
  if (running) return;
  const mine = running = new AbortController();
  buttons.forEach((button) => { button.disabled = false; });
  try {
    await work(mine.signal);
  } finally {
    running = null;
    buttons.forEach((button) => { button.disabled = true; });
  }
}

const stop = () => running?.abort();
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("stop").addEventListener("click", stop);
$("side-stop").addEventListener("click", stop);

// ---- the views
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", chosen);
    one.tabIndex = chosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  tab.focus();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(tabs[(i + step + tabs.length) % tabs.length]);
  });
});

// ---- chat
let conversation = [];

function welcome() {
  $("log").replaceChildren(made("p", "empty", "Ask the model something. Answers stream as they are generated."));
}

class Answer {
  constructor() {
    this.box = made("div", "message assistant");
    this.reasoning = document.createElement("details");
    this.thoughts = made("div", "");
    this.reasoning.append(made("summary", "", "Reasoning"), this.thoughts);
    this.reasoning.hidden = true;
    this.text = made("span", "");
    this.facts = made("span", "facts");
    this.box.append(this.reasoning, this.text, this.facts);
    this.began = performance.now();
    this.first = null;
  }

  add(delta) {
    if (this.first === null && (delta.content || delta.reasoning_content)) {
      this.first = performance.now();
      timeline.ttft = this.first - this.began;
    }
    if (delta.reasoning_content) {
      this.reasoning.hidden = false;
      this.thoughts.textContent += delta.reasoning_content;
    }
    this.text.textContent += delta.content ?? "";
  }

  end(usage, note) {
    const parts = [];
    if (usage && this.first !== null) {
      const seconds = (performance.now() - this.first) / 1000;
      parts.push(`${usage.completion_tokens} tokens`);
      if (seconds > 0) parts.push(`${Math.round(usage.completion_tokens / seconds)} tokens/s`);
      parts.push(`first after ${Math.round(this.first - this.began)} ms`);
    }
    if (note) parts.push(note);
    this.facts.textContent = parts.join(" · ");
  }
}

async function chat(text) {
  if (conversation.length === 0) $("log").replaceChildren();
  conversation.push({ role: "user", content: text });
  $("log").append(made("div", "message user", text));
  const answer = new Answer();
  $("log").append(answer.box);
  $("message").value = "";
  let usage = null, note = "", failed = false;
  await run([$("stop")], async (signal) => {
    try {
      const body = { ...options(), messages: [...system(), ...conversation] };
      for await (const event of events("v1/chat/completions", body, key(), signal)) {
        usage = event.usage ?? usage;
        for (const choice of event.choices) {
          answer.add(choice.delta);
          if (choice.finish_reason === "length") note = "ended by the limit of tokens";
        }
        follow();
      }
    } catch (error) {
      failed = error.name !== "AbortError";
      note = failed ? error.message : "stopped";
    }
  });
  answer.end(usage, note);
  if (failed) answer.box.classList.add("failed");
  if (failed && !answer.text.textContent) conversation.pop();
  else conversation.push({ role: "assistant", content: answer.text.textContent });
  follow();
}

// Keeps the end in view, unless the reader has scrolled up.
function follow() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (text && !running) chat(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
$("reset").addEventListener("click", () => {
  stop();
  conversation = [];
  welcome();
  $("message").focus();
});

// ---- side by side
async function sideBySide(prompt, n) {
  const cells = Array.from({ length: n }, (_, i) => {
    const cell = made("div", "cell");
    const text = made("span", "");
    const facts = made("span", "facts", `stream ${i + 1}`);
    cell.append(facts, text);
    return { cell, text, facts, first: null, tokens: 0 };
  });
  $("grid").replaceChildren(...cells.map((one) => one.cell));
  const total = $("side-total");
  total.textContent = "";
  const began = performance.now();
  let tokens = 0;
  await run([$("side-stop")], async (signal) => {
    try {
      const body = { ...options(), prompt, n };
      for await (const event of events("v1/completions", body, key(), signal)) {
        const now = performance.now();
        tokens = event.usage?.completion_tokens ?? tokens + event.choices.length;
        for (const choice of event.choices) {
          const one = cells[choice.index];
          one.first ??= now;
          one.tokens += 1;
          one.text.textContent += choice.text;
          one.facts.textContent = `stream ${choice.index + 1} · first after ${Math.round(one.first - began)} ms`
            + (choice.finish_reason ? ` · ${choice.finish_reason}` : "");
        }
        const firsts = cells.filter((one) => one.first !== null).map((one) => one.first - began);
        timeline.ttft = Math.max(...firsts);
        total.textContent = `${tokens} tokens, ${Math.round(tokens / (now - began) * 1000)} tokens/s together`;
      }
    } catch (error) {
      total.textContent = error.name === "AbortError" ? `${total.textContent}, stopped` : error.message;
    }
  });
}

$("side-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) sideBySide($("prompt").value, Number($("streams").value));
});

$("pause").addEventListener("click", () => {
  timeline.paused = !timeline.paused;
  $("pause").setAttribute("aria-pressed", timeline.paused);
  $("pause").textContent = timeline.paused ? "Resume" : "Pause";
});

$("settings").addEventListener("submit", (event) => event.preventDefault());
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem("key", key()); names(); });
async function names() {
  try {
    $("model").textContent = (await getJson("v1/models", key())).data[0].id;
  } catch (error) {
    $("model").textContent = error.message;
  }
}
names();
welcome();
