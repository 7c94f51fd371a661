// The page: a chat, one prompt in several streams, and the engine's timeline.

import { events } from "./api.js";
import { Chat } from "./chat.js";
import { Images } from "./images.js";
import { appendText, made } from "./markdown.js";
import { Jobs } from "./jobs.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { store, stored } from "./store.js";
import { Timeline } from "./timeline.js";
import { Tools } from "./tools.js";

const $ = (id) => document.getElementById(id);
const key = () => $("key").value.trim();
const models = new Models({
  name: $("model"), choice: $("choice"), select: $("models"), tab: $("tab-all"), rows: $("rows"), total: $("memory"),
  problem: $("problem"), attach: $("attach"),
}, key);
const timeline = new Timeline($("timeline"), $("figures"), key, () => models.query);
const requests = new Requests({ tab: $("tab-times"), rows: $("times-rows"), problem: $("times-problem") }, key);
const jobs = new Jobs({
  tab: $("tab-jobs"), batches: $("batches"), answers: $("answers"), problem: $("jobs-problem"),
}, key);
const tools = new Tools($("tools"), key);
let running = null;  // the AbortController of the request that is running

function options() {
  const number = (id, name) => ($(id).value === "" ? {} : { [name]: Number($(id).value) });
  return {
    ...models.options, ...number("temperature", "temperature"), ...number("max-tokens", "max_tokens"), ...number("seed", "seed"),
  };
}

function system() {
  const text = $("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function note(text) {
  $("note").textContent = text;
}

// ---- one request at a time
async function run(form, work) {
  const mine = running = new AbortController();
  const send = form.querySelector("[type=submit]"), stop = form.querySelector(".stop");
  const swap = (from, to) => {
    const isFocused = document.activeElement === from;
    to.hidden = false;
    from.hidden = true;
    if (isFocused) to.focus();
  };
  swap(send, stop);
  try {
    await work(mine.signal);
  } finally {
    running = null;
    note("");
    swap(stop, send);
  }
}

const stop = () => running?.abort();
document.querySelectorAll(".stop").forEach((button) => button.addEventListener("click", stop));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || isComposing(event)) return;
  const settings = document.querySelector(".settings[open]");
  if (!settings) return stop();
  settings.open = false;
  settings.querySelector("summary").focus();
});

// A key that an input method uses, for instance Enter to choose a word. Safari only tells by the code.
function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

// Enter sends the form, Shift+Enter begins a line.
function sendsByEnter(area, form, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    if (running) note("One request at a time: Escape stops the running one.");
    else form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
}

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
  if (tab.id === "tab-all") models.refresh();
  if (tab.id === "tab-times") requests.refresh();
  if (tab.id === "tab-jobs") jobs.refresh();
}
tabs.forEach((tab) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const there = tabs.filter((one) => !one.hidden), at = there.indexOf(tab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: there.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    select(there.at(next % there.length));
  });
});

// ---- settings, which a reload keeps
const KEPT = ["temperature", "max-tokens", "seed", "system"];
const kept = stored("settings") ?? {};
for (const id of KEPT) {
  if (typeof kept[id] === "string") $(id).value = kept[id];
  $(id).addEventListener("change", () => store("settings", Object.fromEntries(KEPT.map((one) => [one, $(one).value]))));
}
$("key").value = stored("key") ?? "";
$("key").addEventListener("change", () => {
  store("key", key());
  models.refresh();
  jobs.refresh();
  tools.refresh();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());

// ---- chat
const chat = new Chat($("log"), $("latest"), {
  options, system, key, tools,
  isRunning: () => running !== null,
  run: (work) => run($("chat-form"), work),
  first: (ms) => { timeline.ttft = ms; },
}, note);

const images = new Images({
  area: $("chat"), shown: $("images"), button: $("attach"), input: $("file"), message: $("message"),
}, () => models.takesImages, note);

sendsByEnter($("message"), $("chat-form"), () => {
  const text = $("message").value.trim();
  if (!text && !images.urls.length) return;
  $("message").value = "";
  chat.send(text, images.take());
});
$("reset").addEventListener("click", () => {
  stop();
  images.take();
  chat.clear();
  $("message").focus();
});

// ---- side by side
async function sideBySide(prompt, n) {
  const cells = Array.from({ length: n }, (_, i) => {
    const cell = made("div", "cell");
    const text = made("div", "text");
    const facts = made("div", "facts", `stream ${i + 1}`);
    cell.append(facts, text);
    return { cell, text, facts, first: null };
  });
  $("grid").replaceChildren(...cells.map((one) => one.cell));
  const total = $("side-total");
  total.textContent = "";
  total.className = "";
  const began = performance.now();
  let tokens = 0;
  await run($("side-form"), async (signal) => {
    try {
      const body = { max_tokens: -1, ...options(), stream_options: { include_usage: true }, prompt, n };
      for await (const event of events("v1/completions", body, key(), signal)) {
        const now = performance.now();
        tokens = event.usage?.completion_tokens ?? tokens + event.choices.length;
        for (const choice of event.choices) {
          const one = cells[choice.index];
          if (one.first === null) timeline.ttft = now - began;
          one.first ??= now;
          const text = one.text.hasChildNodes() ? choice.text : choice.text.trimStart();
          if (text) appendText(one.text, text);
          one.facts.textContent = `stream ${choice.index + 1} · first after ${Math.round(one.first - began)} ms`
            + (choice.finish_reason ? ` · ${choice.finish_reason}` : "");
        }
        total.textContent = `${tokens} tokens, ${Math.round(tokens / (now - began) * 1000)} tokens/s together`;
      }
    } catch (error) {
      const isStopped = error.name === "AbortError";
      total.classList.toggle("error", !isStopped);
      total.textContent = [total.textContent, isStopped ? "stopped" : error.message].filter(Boolean).join(", ");
    }
  });
}

sendsByEnter($("prompt"), $("side-form"), () => sideBySide($("prompt").value, Number($("streams").value)));

$("pause").addEventListener("click", () => timeline.pause(!timeline.paused));
timeline.onpause = (paused) => {
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Resume" : "Pause";
};
if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) timeline.pause(true);

if (window.matchMedia("(pointer: fine)").matches) $("message").focus();  // elsewhere it would open a keyboard
