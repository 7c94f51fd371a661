// Markdown that arrives in pieces, shown as elements and text nodes. Nothing that a model writes is parsed as HTML.
//
// Every character is read a bounded number of times, however the text is cut and nested. The beginning of a line is
// held back until it is certain what the line is (an item, a heading, a row); the rest of it flows into the open block
// at once. Depths and the lengths of what is held back are limited: what exceeds a limit is shown as text. What is held
// back is not read anew with each piece: addresses are read on from where the last piece ended, and the beginning of a
// line when it is longer by an eighth.

const DEPTH = 16;   // quotes and items that contain each other
const MARKS = 16;   // marks in a paragraph that wait for their other half
const HEAD = 1024;  // characters of a line within which its kind must be certain
const LINK = 2048;  // characters of a link's address
const RUN = 16;     // equal marks side by side
const CHUNK = 4096; // characters of a text node: appending to a node copies it

const SCHEMES = ["http:", "https:", "mailto:"];
const FENCE = /^(`{3,}|~{3,})([^`]*)$/;
const RULE = /^([-*_])(?: *\1){2,} *$/;
const ITEM = /^(?:([-*+])|(\d{1,9})([.)]))(?=[ \t]|$)/;
const UNDERLINE = /^(={3,}|-{3,}) *$/;
const DELIMITERS = /^\|? *:?-+:?(?: *\| *:?-+:?)*(?: *\|)? *$/;
const UNCERTAIN = /^(?:[-*_+=|: \t]*|\d{1,9}(?:[.)][ \t]*)?|#{1,6}[ \t]*|(?:```|~~~).*|``?|~~?)$/;

const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const WORD = /[\p{L}\p{N}]/u;
const SPECIAL = /[\\`*_~[\]!]|https?:\/\//g;
const SPECIAL_BEGINS = /h(?:t(?:t(?:p(?:s?(?::\/?)?)?)?)?)?$/;
const IN_ADDRESS = /^[^\s<>"`[\]\\|^{}*\u3000-\u303f\uff00-\uffef]*/;

export function made(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.append(text);
  return element;
}

// Appends text, to the last text node where that is not long and not kept apart.
export function appendText(parent, text, apart = null) {
  const last = parent.lastChild;
  if (last !== null && last !== apart && last.nodeType === Node.TEXT_NODE && last.length < CHUNK) last.appendData(text);
  else parent.append(text);
}

// An address that a link may have, normalized; null for all others, such as those with scripts or data.
function allowed(address) {
  try {
    const url = new URL(address);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// What follows the text of a link: (address), (<address>), (address "title"). Each character is read once.
class Target {
  constructor() {
    this.state = "start";
    this.n = 0;        // characters that were read
    this.address = "";
  }

  // Reads on, from the i-th character of s. True: the target is whole; false: it is none; null: it may become one.
  read(s, i) {
    while (i < s.length) {
      if (this.n >= LINK) return false;
      this.n++;
      const c = s[i++];
      if (c === ")" && ["before", "bare", "closed", "gap", "end"].includes(this.state)) return true;
      this.state = this.next(c);
      if (this.state === null) return false;
    }
    return this.n >= LINK ? false : null;
  }

  next(c) {
    const isSpace = SPACE.test(c);
    switch (this.state) {
      case "start":
        return c === "(" ? "before" : null;
      case "before":
        if (isSpace) return "before";
        if (c === "<") return "angle";
        // falls through: the address begins
      case "bare":
        if (isSpace) return "gap";
        if (c === "<" || c === ">") return null;
        this.address += c;
        return c === "(" ? "nested" : "bare";
      case "nested":  // brackets in an address
        if (isSpace || c === "(" || c === "<" || c === ">") return null;
        this.address += c;
        return c === ")" ? "bare" : "nested";
      case "angle":
        if (c === ">") return "closed";
        if (isSpace || c === "<") return null;
        this.address += c;
        return "angle";
      case "closed":
        return isSpace ? "gap" : null;
      case "gap":
        return isSpace ? "gap" : c === '"' || c === "'" ? c : null;
      case "end":
        return isSpace ? "end" : null;
      default:  // in a title, whose mark is the state
        return c === this.state ? "end" : this.state;
    }
  }
}

// The text of a paragraph, a heading or a cell: emphasis, code, links. Emphasis and code are shown from their first
// mark on; a mark without its other half becomes text again when the paragraph ends.
class Inline {
  constructor(parent) {
    this.at = parent;      // where text is appended
    this.open = [];        // {mark, n, element, parent} of emphasis; {mark: "[", node, isImage} of links
    this.held = "";        // what the next characters decide
    this.target = null;    // of the link that is held
    this.known = 0;        // how many characters of what is held are certainly of an address
    this.before = " ";     // the last character
    this.run = "";         // the character of a run that is too long for a mark
    this.code = null;      // {ticks, element}
    this.hasCode = true;
  }

  write(text) {
    this.held = this.read(this.held + text, false);
  }

  end() {
    this.read(this.held, true);
    this.held = "";
    if (this.code) {  // backticks without their other half; what follows them is read once more
      const { ticks, element } = this.code;
      const rest = element.textContent;
      element.remove();
      this.code = null;
      this.hasCode = false;
      this.text("`".repeat(ticks));
      this.read(rest, true);
    }
    while (this.open.length) this.undo();
  }

  // Returns what it did not read: its meaning depends on the next characters.
  read(s, isLast) {
    let i = 0;
    while (i < s.length) {
      const n = this.code ? this.readCode(s, i, isLast) : this.readText(s, i, isLast);
      if (n === 0) return s.slice(i);
      i += n;
    }
    return "";
  }

  readCode(s, i, isLast) {
    const { ticks, element } = this.code;
    const tick = s.indexOf("`", i);
    const end = tick < 0 ? s.length : tick;
    if (end > i) {
      appendText(element, s.slice(i, end));
      this.run = "";
      return end - i;
    }
    const n = runLength(s, i);
    if (this.run === "`" || n > RUN) {
      appendText(element, "`".repeat(n));
      this.run = "`";
      return n;
    }
    if (i + n === s.length && !isLast) return 0;
    if (n === ticks) {
      const all = element.textContent;
      if (/^ .* $/s.test(all) && all.trim()) element.textContent = all.slice(1, -1);
      this.code = null;
      this.before = "`";
      this.run = "";
    } else appendText(element, "`".repeat(n));
    return n;
  }

  readText(s, i, isLast) {
    SPECIAL.lastIndex = i;
    const at = SPECIAL.exec(s)?.index ?? s.length;
    if (at > i) {
      const begins = at === s.length && !isLast ? SPECIAL_BEGINS.exec(s.slice(Math.max(i, at - 9))) : null;
      const n = at - i - (begins?.[0].length ?? 0);
      if (n > 0) this.text(s.slice(i, i + n));
      return n;
    }
    const c = s[i], isEnd = !isLast && i + 1 === s.length;
    switch (c) {
      case "\\": {
        if (isEnd) return 0;
        const next = s[i + 1] ?? "";
        if (next === "\n") return 1;
        const isEscape = /[!-/:-@[-`{-~]/.test(next);
        this.text(isEscape ? next : c);
        return isEscape ? 2 : 1;
      }
      case "`": case "*": case "_": case "~": {
        const n = runLength(s, i);
        if (this.run === c || n > RUN) {
          this.text(c.repeat(n));
          this.run = c;
          return n;
        }
        if (i + n === s.length && !isLast) return 0;
        if (c === "`") this.openCode(n);
        else this.emphasize(c, n, s[i + n] ?? " ");
        return n;
      }
      case "!": {
        if (isEnd) return 0;
        if (s[i + 1] !== "[") this.text(c);
        else this.openLink("![");
        return s[i + 1] === "[" ? 2 : 1;
      }
      case "[":
        this.openLink(c);
        return 1;
      case "]":
        return isEnd ? 0 : this.closeLink(s, i, isLast);
      default:
        return this.bareLink(s, i, isLast);
    }
  }

  text(s) {
    appendText(this.at, s, this.open.at(-1)?.node);
    this.before = s.at(-1);
    this.run = "";
  }

  openCode(n) {
    if (!this.hasCode) return this.text("`".repeat(n));
    const element = made("code");
    this.at.append(element);
    this.code = { ticks: n, element };
    this.run = "";
  }

  // A run of * or _ may end what began before it, then begin something (CommonMark's "flanking" rules).
  emphasize(c, n, after) {
    const before = this.before;
    const isLeft = !SPACE.test(after)
      && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const isRight = !SPACE.test(before)
      && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const isInWord = isLeft && isRight && !PUNCTUATION.test(before) && (c === "_" || n === 1);  // a_b_c, 2*3*4
    if (c === "~" && n !== 2) return this.text(c.repeat(n));
    if (isRight && (c !== "_" || !isLeft || PUNCTUATION.test(after))) {
      while (n > 0) {
        const k = this.open.findLastIndex((one) => one.mark === c && one.n <= n);
        if (k < 0) break;
        n -= this.open[k].n;
        while (this.open.length > k + 1) this.undo();
        this.at = this.open.pop().parent;
        this.before = c;
        this.run = "";
      }
    }
    if (n === 0) return;
    if (!isLeft || isInWord || n > 3 || this.open.length + 2 > MARKS) return this.text(c.repeat(n));
    for (const part of n === 3 ? [1, 2] : [n]) {
      const element = made(c === "~" ? "del" : part === 2 ? "strong" : "em");
      this.open.push({ mark: c, n: part, element, parent: this.at });
      this.at.append(element);
      this.at = element;
    }
    this.before = c;
    this.run = "";
  }

  openLink(mark) {
    if (this.open.length >= MARKS) return this.text(mark);
    const node = document.createTextNode(mark);
    this.at.append(node);
    this.open.push({ mark: "[", node, isImage: mark === "![" });
    this.before = "[";
    this.run = "";
  }

  closeLink(s, i, isLast) {
    const k = this.open.findLastIndex((one) => one.mark === "[");
    if (k < 0) {
      this.text("]");
      return 1;
    }
    const target = this.target ?? new Target();
    this.target = null;
    const isTarget = target.read(s, i + 1 + target.n);
    if (isTarget === null && !isLast) {
      this.target = target;
      return 0;
    }
    const address = isTarget && allowed(target.address);
    if (!address) {
      this.open.splice(k, 1);
      this.text("]");
      return 1;
    }
    while (this.open.length > k + 1) this.undo();
    const { node, isImage } = this.open.pop();
    if (!isImage || !this.inLink()) {
      const link = linked(address);
      while (node.nextSibling) link.append(node.nextSibling);
      if (!link.hasChildNodes()) link.append(address);
      this.at.append(link);
      this.open = this.open.filter((one) => one.mark !== "[");  // a link contains no links
    }
    node.remove();
    this.before = ")";
    this.run = "";
    return 1 + target.n;
  }

  inLink() {
    return this.open.some((one) => one.mark === "[");
  }

  bareLink(s, i, isLast) {
    if (WORD.test(this.before)) {  // not at the beginning of a word
      this.text("http");
      return 4;
    }
    const known = this.known || s.indexOf("//", i) - i + 2;
    const n = known + IN_ADDRESS.exec(s.slice(i + known, i + LINK))[0].length;
    if (!isLast && i + n === s.length && n < LINK) {
      this.known = n;
      return 0;
    }
    this.known = 0;
    const address = s.slice(i, i + n);
    // A sentence's mark at the end, and a bracket that closes more than the address opens, are not of the address.
    let end = address.length, closes = 0;
    for (const c of address) closes += c === ")" ? 1 : c === "(" ? -1 : 0;
    while (/[.,;:!?'_~]/.test(address[end - 1]) || (address[end - 1] === ")" && closes-- > 0)) end--;
    const shown = address.slice(0, end);
    const url = address.length < LINK && !this.inLink() ? allowed(shown) : null;
    if (url) {
      const link = linked(url);
      link.append(shown);
      this.at.append(link);
      this.before = shown.at(-1);
      this.run = "";
    } else this.text(shown);
    return end;
  }

  // What was opened last was no mark: it becomes text.
  undo() {
    const { mark, n, element, parent } = this.open.pop();
    if (mark === "[") return;
    element.remove();
    appendText(parent, mark.repeat(n), this.open.at(-1)?.node);
    while (element.firstChild) parent.append(element.firstChild);
    this.at = parent;
  }
}

function linked(address) {
  const link = made("a");
  link.href = address;
  link.title = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

function runLength(s, i) {
  let end = i + 1;
  while (end < s.length && s[end] === s[i]) end++;
  return end - i;
}

function cellsOf(row) {
  const cells = row.trim().replace(/^\|/, "").replaceAll("\\|", "\0").split("|");
  if (cells.length > 1 && cells.at(-1).trim() === "") cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\0", "|"));
}

// Tabs before a line's first character become spaces.
function withoutTabs(line) {
  return /^ *\t/.test(line.slice(0, HEAD)) ? line.replace(/^[ \t]+/, (blanks) => blanks.replaceAll("\t", "    ")) : line;
}

function afterQuote(line) {
  const rest = withoutTabs(line.slice(1));
  return rest.slice(rest[0] === " " ? 1 : 0);
}

function indentOf(line) {
  let n = 0;
  while (n < HEAD && line[n] === " ") n++;
  return n;
}

export class Markdown {
  constructor(root) {
    this.root = root;
    this.containers = [];  // open quotes and items: {isQuote, element, list, mark, least, width}
    this.leaf = null;      // the open block with text: {kind, ...}
    this.line = "";        // what was not read of a line whose kind is not certain yet
    this.beginLine();
  }

  beginLine() {
    this.line = "";
    this.next = 0;            // the length from which on it is looked at again
    this.flows = false;       // the rest of the line is text of the open block
    this.k = 0;               // the line continues the first k containers
    this.isMatched = false;   // and no others
    this.sibling = undefined; // an item that the line's item may follow in the same list
  }

  write(text) {
    text = text.replaceAll("\r", "").replaceAll("\0", "\ufffd");
    for (let i = 0; i < text.length;) {
      const end = text.indexOf("\n", i);
      const part = text.slice(i, end < 0 ? text.length : end);
      if (this.flows) this.flow(part);
      else {
        this.line += part;
        if (end >= 0) this.begin(true);
        else if (this.leaf?.kind !== "table" && this.line.length >= this.next) {  // a row is shown when it is whole
          this.begin(false);
          this.next = this.line.length + (this.line.length >> 3);
        }
      }
      if (end < 0) break;
      this.endLine();
      i = end + 1;
    }
  }

  // Ends the text: what was held back is shown.
  end() {
    if (!this.flows && this.line) this.begin(true);
    this.endLine();
    this.close(0);
  }

  endLine() {
    if (this.leaf?.kind === "heading") this.close(this.containers.length);
    this.beginLine();
  }

  // Closes the open block, and all quotes and items but the first n.
  close(n) {
    this.leaf?.inline?.end();
    this.leaf = null;
    this.containers.length = n;
  }

  append(element) {
    (this.containers.at(-1)?.element ?? this.root).append(element);
    return element;
  }

  // Adds to the open block's text; so will the rest of the line.
  flow(text) {
    const { leaf } = this;
    this.flows = true;
    if (leaf.raw !== null) leaf.raw += text;
    if (leaf.inline) leaf.inline.write(text);
    else if (text) appendText(leaf.element, text);
  }

  // Reads the beginning of a line, unless more of it must be known. `isWhole`: the line ends here.
  begin(isWhole) {
    const isShort = this.line.length < HEAD;
    const isCertain = isWhole || !isShort;
    const isCode = this.leaf?.kind === "code";
    if (!isCode) this.line = withoutTabs(this.line);
    if (!this.isMatched && !this.match(isCertain)) return;
    const isInside = this.k === this.containers.length;
    let indent = indentOf(this.line);
    let body = this.line.slice(indent);
    if (body === "" && !isCertain) return;
    if (isCode) {
      if (!this.containers.slice(this.k).some((one) => one.isQuote)) return this.code(body, indent, isWhole, isShort);
      this.close(this.k);
    }
    if (body === "") {
      const quote = this.containers.findIndex((one, i) => i >= this.k && one.isQuote);
      return this.close(quote < 0 ? this.containers.length : quote);
    }
    if (this.leaf?.kind === "table") {
      const isRow = isInside && body.includes("|") && !/^(?:#{1,6}[ \t]|>|```|~~~)/.test(body);
      if (isRow) return this.row(this.leaf, cellsOf(body), "td");
      this.close(this.k);
    }

    // Several quotes and items may begin on one line: > - 1. text
    while (this.k < DEPTH) {
      const follows = this.leaf?.kind === "text" && this.k === this.containers.length;
      if (follows && indent > 3 && this.k === 0) break;
      if (body[0] === ">") {
        if (body === ">" && !isCertain) return;
        this.close(this.k++);
        this.containers.push({ isQuote: true, element: this.append(made("blockquote")) });
        this.line = afterQuote(body);
      } else {
        if (!isCertain && UNCERTAIN.test(body)) return;
        if (follows && isWhole && isShort && this.leaf.raw !== null && this.endsFirstLine(body)) return;
        if (isWhole && isShort && RULE.test(body)) {
          this.close(this.k);
          return void this.append(made("hr"));
        }
        const found = ITEM.exec(body);
        const isEmpty = found !== null && body.slice(found[0].length).trim() === "";
        if (!found || (follows && (isEmpty || (found[2] !== undefined && Number(found[2]) !== 1)))) break;
        this.openItem(found, body, indent, isEmpty);
      }
      this.sibling = undefined;
      indent = indentOf(this.line);
      body = this.line.slice(indent);
      if (body === "") return;
    }
    if (!isCertain && UNCERTAIN.test(body)) return;
    this.openText(body, indent, isWhole && isShort);
  }

  // Reads the marks of the open quotes, and the indentation of the open items. False if more must be known.
  match(isCertain) {
    for (; this.k < this.containers.length; this.k++) {
      const one = this.containers[this.k], indent = indentOf(this.line);
      if (!isCertain && indent === this.line.length) return false;
      if (one.isQuote) {
        if (this.line[indent] !== ">" || indent > 3) break;
        if (!isCertain && indent + 1 === this.line.length) return false;
        this.line = afterQuote(this.line.slice(indent));
      } else if (indent < this.line.length) {  // an empty line continues an item
        if (indent < one.least) break;
        this.line = this.line.slice(Math.min(indent, one.width));
      }
    }
    this.isMatched = true;
    this.sibling = this.containers[this.k];
    return true;
  }

  // A line of code. Only a quote's end or a fence ends the block: models do not always indent code as its item.
  code(body, indent, isWhole, isShort) {
    const { leaf } = this, { fence } = leaf;
    if (isShort && body[0] === fence[0] && runLength(body, 0) === body.trimEnd().length) {
      if (!isWhole) return;
      if (body.trimEnd().length >= fence.length) return this.close(this.containers.length);
    }
    const before = leaf.isEmpty ? "" : "\n";
    leaf.isEmpty = false;
    this.flow(before + " ".repeat(Math.max(indent - leaf.indent, 0)) + body);
  }

  // Whether a line makes the paragraph of one line before it a heading, or a table's head.
  endsFirstLine(body) {
    const { element, inline, raw } = this.leaf;
    if (UNDERLINE.test(body)) {
      inline.end();
      const heading = made(body[0] === "=" ? "h1" : "h2");
      while (element.firstChild) heading.append(element.firstChild);
      element.replaceWith(heading);
      this.leaf = null;
      return true;
    }
    if (!raw.includes("|") || !DELIMITERS.test(body)) return false;
    const names = cellsOf(raw), delimiters = cellsOf(body);
    if (names.length !== delimiters.length) return false;
    const aligns = delimiters.map((one) => (
      !one.endsWith(":") ? "" : one.startsWith(":") ? "center" : "right"));
    const box = made("div", "table"), table = made("table"), head = made("thead"), rows = made("tbody");
    box.tabIndex = 0;
    table.append(head, rows);
    box.append(table);
    element.replaceWith(box);
    this.row({ rows: head, aligns }, names, "th");
    this.leaf = { kind: "table", rows, aligns, raw: null };
    return true;
  }

  row({ rows, aligns }, cells, tag) {
    const row = made("tr");
    cells.slice(0, aligns.length).forEach((text, i) => {
      const cell = made(tag, aligns[i]), inline = new Inline(cell);
      inline.write(text);
      inline.end();
      row.append(cell);
    });
    rows.append(row);
  }

  openItem([marker, bullet, number, after], body, indent, isEmpty) {
    const { sibling } = this, mark = bullet ?? after;
    let list = sibling?.mark === mark ? sibling.list : null;
    this.close(this.k++);
    if (list === null) {
      list = this.append(made(bullet ? "ul" : "ol"));
      if (number !== undefined && Number(number) !== 1) list.start = Number(number);
    }
    const rest = withoutTabs(body.slice(marker.length)), gap = indentOf(rest);
    const used = isEmpty || gap > 4 ? 1 : gap;  // what is indented more was meant so
    const width = indent + marker.length + used;
    const element = made("li");
    list.append(element);
    this.containers.push({ isQuote: false, element, list, mark, width, least: Math.min(width, indent + 2) });
    this.line = isEmpty ? "" : rest.slice(used);
  }

  openText(body, indent, isWhole) {
    const heading = /^(#{1,6})(?:[ \t]+|$)/.exec(body);
    if (heading) {
      this.close(this.k);
      const element = this.append(made(`h${heading[1].length}`));
      this.leaf = { kind: "heading", inline: new Inline(element), raw: null };
      return this.flow(body.slice(heading[0].length));
    }
    const fence = isWhole ? FENCE.exec(body) : null;
    if (fence) {
      this.close(this.k);
      return this.openCode(fence[1], fence[2].trim().split(/\s/)[0], indent);
    }
    const isTop = this.k === 0 && this.containers.length === 0;
    const text = isTop ? " ".repeat(indent) + body : body;  // code without a fence keeps its shape
    if (this.leaf?.kind === "text" && body[0] !== "|") {  // also where the line lacks the marks of its containers
      this.leaf.raw = null;
      return this.flow(`\n${text}`);
    }
    this.close(this.k);
    const element = this.append(made("p"));
    this.leaf = { kind: "text", element, inline: new Inline(element), raw: "" };
    this.flow(text);
  }

  openCode(fence, language, indent) {
    const box = this.append(made("div", "code")), bar = made("div", "bar");
    const copy = made("button", "copy", "Copy");
    copy.type = "button";
    bar.append(made("span", "", language.slice(0, 40)), copy);
    const shown = made("pre"), element = made("code");
    shown.tabIndex = 0;
    shown.append(element);
    box.append(bar, shown);
    this.leaf = { kind: "code", element, fence, indent, isEmpty: true, raw: null };
  }
}
