// The last requests: where the time of each went.

import { getJson } from "./api.js";
import { made } from "./markdown.js";

const EVERY_MS = 1000;
const MOST = 50;

export class Requests {
  // `parts`: the page's elements {tab, rows, problem}; `key`: returns the API key.
  constructor(parts, key) {
    this.parts = parts;
    this.key = key;
    this.run();
  }

  async run() {
    for (;;) {
      await new Promise((done) => setTimeout(done, EVERY_MS));
      if (!document.hidden && this.parts.tab.getAttribute("aria-selected") === "true") await this.refresh();
    }
  }

  async refresh() {
    const { rows, problem } = this.parts;
    try {
      const { data } = await getJson("requests", this.key());
      problem.textContent = data.length ? "" : "No request was answered yet.";
      rows.replaceChildren(...data.slice(0, MOST).map(row));
    } catch (error) {
      problem.textContent = error.message;
    }
  }
}

function row(one) {
  const ms = (value) => (value === undefined ? "" : Math.round(value).toLocaleString("en"));
  const { queue, prompt, generate } = one.phases_ms ?? {};
  const made_of = [
    new Date(one.ended_at * 1000).toLocaleTimeString(), one.model ?? "", one.path, one.status, ms(one.total_ms), ms(queue),
    ms(prompt), ms(generate), `${one.n_prompt_tokens ?? "–"} (${one.n_cached_tokens})`, one.n_completion_tokens ?? "–",
    one.slowest ?? "",
  ];
  const found = made("tr");
  found.append(...made_of.map((text) => made("td", "", String(text))));
  return found;
}
