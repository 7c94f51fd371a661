// What the server computes when no client waits: batches, and answers in the background.

import { getJson, postJson } from "./api.js";
import { made } from "./markdown.js";

const EVERY_MS = 1000;
const ENDED = ["completed", "failed", "cancelled", "expired"];

export class Jobs {
  // `parts`: the page's elements {tab, batches, answers, problem}; `key`: returns the API key.
  constructor(parts, key) {
    this.parts = parts;
    this.key = key;
    this.run();
  }

  async run() {
    await this.refresh();
    for (;;) {
      await new Promise((done) => setTimeout(done, EVERY_MS));
      if (!document.hidden && this.parts.tab.getAttribute("aria-selected") === "true") await this.refresh();
    }
  }

  async refresh() {
    const { tab, batches, answers, problem } = this.parts;
    try {
      const found = await getJson("jobs", this.key());
      tab.hidden = !found.is_stored;
      problem.textContent = found.batches.length + found.answers.length ? "" : "There are no batches, and nothing is computed in the background.";
      this.fill(batches, found.batches.map((one) => this.batch(one)));
      this.fill(answers, found.answers.map((one) => this.answer(one)));
    } catch (error) {
      problem.textContent = error.message;
    }
  }

  fill(rows, all) {
    const focused = document.activeElement?.dataset?.job;  // its row is made again
    rows.closest("table").hidden = !all.length;
    rows.replaceChildren(...all);
    if (focused !== undefined) [...rows.querySelectorAll("button")].find((one) => one.dataset.job === focused)?.focus();
  }

  batch(one) {
    const { total, completed, failed } = one.request_counts;
    const cell = made("td");
    if (total) {
      const bar = Object.assign(document.createElement("progress"), { max: total, value: completed + failed });
      bar.setAttribute("aria-label", `Progress of ${one.id}`);
      cell.append(bar, ` ${completed + failed} of ${total}${failed ? `, ${failed} failed` : ""}`);
    }
    const errors = (one.errors?.data ?? []).map(({ line, message }) => (line ? `line ${line}: ${message}` : message));
    const state = made("td", errors.length ? "error" : "", [one.status, ...errors.slice(0, 3)].join("; "));
    return this.row(one, [made("td", "", one.endpoint), state, cell], ENDED.includes(one.status) ? null : `v1/batches/${one.id}/cancel`);
  }

  answer(one) {
    const attempts = one.n_attempts > 1 ? `, attempt ${one.n_attempts}` : "";
    const events = one.n_events ? `${one.n_events} events of its stream` : "";
    return this.row(one, [made("td", "", one.model ?? ""), made("td", "", one.status + attempts), made("td", "", events)], `v1/responses/${one.id}/cancel`);
  }

  row(one, cells, cancel) {
    const row = document.createElement("tr");
    const head = made("th", "id", one.id);
    head.scope = "row";
    const last = document.createElement("td");
    if (cancel !== null) {
      const button = made("button", "", "Cancel");
      button.type = "button";
      button.dataset.job = one.id;
      button.setAttribute("aria-label", `Cancel ${one.id}`);
      button.addEventListener("click", () => this.cancel(cancel));
      last.append(button);
    }
    row.append(head, made("td", "", new Date(one.created_at * 1000).toLocaleTimeString()), ...cells, last);
    return row;
  }

  async cancel(path) {
    try {
      await postJson(path, {}, this.key());
    } catch (error) {
      this.parts.problem.textContent = error.message;
      return;
    }
    await this.refresh();
  }
}
