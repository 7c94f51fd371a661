// The engine now: figures, and the stages of the last two seconds.

import { getJson } from "./api.js";

const SHOWN_S = 2;
const EVERY_MS = 300;
const AFTER_ERROR_MS = 2000;
const LABEL = 64;

export class Timeline {
  // `query`: returns what is added to the request, such as the model.
  constructor(canvas, figures, key, query) {
    this.canvas = canvas;
    this.figures = figures;
    this.key = key;
    this.query = query;
    this.paused = false;  // the drawing stands still; the figures do not
    this.onpause = () => {};
    this.spans = [];
    this.stages = [];
    this.now = 0;
    this.drawn = { now: 0, spans: [] };
    this.last = null;
    this.ttft = null;
    window.addEventListener("resize", () => this.draw());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.run();
  }

  async run() {
    for (;;) {
      let pause = EVERY_MS;
      if (!document.hidden) {
        try {
          this.take(await getJson(`timeline?after=${this.now}${this.query()}`, this.key()));
        } catch (error) {
          this.figures.textContent = error.message;
          this.last = null;
          pause = AFTER_ERROR_MS;
        }
      }
      await new Promise((done) => setTimeout(done, pause));
    }
  }

  pause(paused) {
    this.paused = paused;
    this.onpause(paused);
  }

  take(answer) {
    if (answer.now < this.now) this.spans = [];  // another server
    this.now = answer.now;
    this.stages = answer.stages;
    this.spans = this.spans.concat(answer.spans).filter((span) => span[3] > this.now - SHOWN_S - 1);
    const stats = answer.stats;
    if (stats === null) {  // its model is not loaded
      this.show([["not loaded", ""]]);
      this.last = null;
      this.now = 0;
      this.draw();
      return;
    }
    if (this.last !== null && this.now > this.last.now) {
      const seconds = this.now - this.last.now;
      const rate = (name) => Math.round((stats[name] - this.last.stats[name]) / seconds);
      this.show([
        ["generated", `${rate("n_completion_tokens").toLocaleString("en")} tokens/s`],
        ["prompts", `${rate("n_prompt_tokens").toLocaleString("en")} tokens/s`],
        ["first token", this.ttft === null ? "–" : `${Math.round(this.ttft)} ms`],
        ["running", stats.n_active],
        ["queued", stats.n_queued],
        ["KV cells", `${stats.n_used_cells.toLocaleString("en")} of ${stats.n_cells.toLocaleString("en")}`],
        ["threads", stats.n_threads],
      ]);
    }
    this.last = answer;
    if (this.paused) return;
    this.drawn = { now: this.now, spans: this.spans };
    this.draw();
  }

  show(figures) {
    this.figures.replaceChildren(...figures.map(([name, value]) => {
      const item = document.createElement("span");
      const number = document.createElement("b");
      number.textContent = value;
      item.append(`${name} `, number);
      return item;
    }));
  }

  draw() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const draw = canvas.getContext("2d");
    draw.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const lanes = this.stages.length || 1;
    const axis = 14, step = (height - axis) / lanes;
    draw.font = "11px system-ui, sans-serif";
    draw.textBaseline = "middle";
    const { now } = this.drawn;
    const shown = this.drawn.spans.filter((span) => span[3] >= now - SHOWN_S);
    canvas.dataset.spans = shown.length;
    const x = (s) => LABEL + (s - (now - SHOWN_S)) / SHOWN_S * (width - LABEL);
    this.stages.forEach((stage, lane) => {
      const y = lane * step;
      draw.fillStyle = style.getPropertyValue("--line");
      draw.fillRect(LABEL, y + step - 1, width - LABEL, 1);
      draw.fillStyle = style.getPropertyValue("--dim");
      draw.fillText(stage, 0, y + step / 2);
      draw.fillStyle = style.getPropertyValue(`--${stage}`) || style.getPropertyValue("--accent");
      for (const [of, , begin, end] of shown) {
        if (of !== lane) continue;
        const left = Math.max(x(begin), LABEL);
        draw.fillRect(left, y + 2, Math.max(x(end) - left, 0.6), step - 4);
      }
    });
    draw.fillStyle = style.getPropertyValue("--dim");
    for (let i = 0; i <= 4; i++) {
      const text = `${-SHOWN_S + i * SHOWN_S / 4} s`;
      const at = LABEL + i / 4 * (width - LABEL);
      draw.textAlign = i === 4 ? "right" : i === 0 ? "left" : "center";
      draw.fillText(text, at, height - axis / 2);
    }
  }
}
