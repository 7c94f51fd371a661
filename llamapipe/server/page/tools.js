// Tools of MCP servers: which servers the model may use, and its calls, which the reader allows or refuses.

import { getJson } from "./api.js";
import { made } from "./markdown.js";
import { store, stored } from "./store.js";

export class Tools {
  // `field`: the part of the settings that lists the servers; `key`: returns the API key.
  constructor(field, key) {
    this.field = field;
    this.key = key;
    this.boxes = [];
    this.allowed = [];  // calls that need no question in this conversation, as [server, tool]
    this.refresh();
  }

  async refresh() {
    let found;
    try {
      found = await getJson("mcp", this.key());
    } catch {
      return;  // the page says elsewhere why it reaches nothing
    }
    const chosen = stored("mcp") ?? [];
    this.boxes = found.servers.map(({ server_label: label }) => {
      const box = Object.assign(document.createElement("input"), { type: "checkbox", value: label, checked: chosen.includes(label) });
      box.addEventListener("change", () => store("mcp", this.labels));
      return box;
    });
    this.field.querySelectorAll("label").forEach((label) => label.remove());
    this.field.append(...this.boxes.map((box) => {
      const label = made("label", "check");
      label.append(box, box.value);
      return label;
    }));
    this.field.hidden = !this.boxes.length;
  }

  get labels() {
    return this.boxes.filter((box) => box.checked).map((box) => box.value);
  }

  // The tools of a request.
  get asked() {
    return this.labels.map((label) => ({
      type: "mcp", server_label: label,
      require_approval: { never: { tool_names: this.allowed.filter(([server]) => server === label).map(([, tool]) => tool) } },
    }));
  }

  allow({ server_label, name }) {
    this.allowed.push([server_label, name]);
  }

  clear() {
    this.allowed = [];
  }
}

const KINDS = ["mcp_list_tools", "mcp_call", "mcp_approval_request"];

export function isCall({ type }) {
  return KINDS.includes(type);
}

// Shows an item of an answer: a list of tools, a call, or a question. `decide(how)`: what to do at a click on a button,
// "once", "always" or "no"; without it there are none. `said`: how the question was answered.
export function showCall(item, decide, said) {
  const { type, server_label, name, arguments: given, output, error, tools } = item;
  const box = made("details", "call");
  if (type === "mcp_list_tools") {
    box.append(made("summary", "", `${server_label}: ${tools.length} tools`));
    box.append(made("pre", "", tools.map((tool) => `${tool.name}: ${tool.description}`).join("\n")));
    return box;
  }
  if (type === "mcp_approval_request") {
    const how = decide ? "asks to call" : { true: "was allowed to call", false: "was not allowed to call" }[said] ?? "asked to call";
    box.append(made("summary", "", `${server_label}: the model ${how} ${name}`), made("pre", "", given || "{}"));
    if (decide) box.append(buttons(name, decide));
    box.open = Boolean(decide);
    return box;
  }
  box.append(made("summary", "", `${server_label} · ${name}`), made("pre", "", given || "{}"));
  const result = output ?? (error ? messageOf(error) : null);
  if (result === null) box.firstChild.append(" …");
  else box.append(made("pre", error ? "error" : "", result));
  return box;
}

function messageOf(error) {
  return error.message ?? (error.content ?? []).map((part) => part.text).join("\n");
}

function buttons(name, decide) {
  const line = made("div", "buttons");
  for (const [how, text] of [["once", "Allow"], ["always", `Always allow ${name}`], ["no", "Refuse"]]) {
    const button = made("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => decide(how));
    line.append(button);
  }
  return line;
}
