// A little Markdown as DOM nodes: code blocks, lists, headings, paragraphs; inline code, bold, emphasis. Model text only ever
// becomes text nodes, so nothing in it can be markup. Text that is still growing is drawn anew only where it changed.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^ {0,3}#{1,6}\s+(.+?)\s*#*$/;

/** Splits text into blocks: { kind, source, ... }. An unclosed code block reaches to the end. */
export function parseBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const read = readCode(lines, at) ?? readHeading(lines, at) ?? readList(lines, at) ?? readParagraph(lines, at);
    const source = lines.slice(at, read.end).join("\n");
    if (source.trim() !== "") blocks.push({ ...read, source });
    at = read.end;
  }
  return blocks;
}

function readCode(lines, start) {
  const opening = FENCE.exec(lines[start]);
  if (!opening) return null;
  const [, fence, language] = opening;
  let end = start + 1;
  const closes = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  while (end < lines.length && !closes(lines[end])) end++;
  return { kind: "code", language, text: lines.slice(start + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function readHeading(lines, start) {
  const heading = HEADING.exec(lines[start]);
  return heading && { kind: "heading", text: heading[1], end: start + 1 };
}

function readList(lines, start) {
  const first = ITEM.exec(lines[start]);
  if (!first) return null;
  const ordered = first[1] !== undefined;
  const items = [];
  let end = start;
  for (; end < lines.length; end++) {
    const item = ITEM.exec(lines[end]);
    if (item && (item[1] !== undefined) === ordered) items.push(item[2]);
    else if (/^\s{2,}\S/.test(lines[end]) && !FENCE.test(lines[end])) items[items.length - 1] += "\n" + lines[end].trim();
    else if (lines[end].trim() !== "" || !nextIsItem(lines, end, ordered)) break;
  }
  return { kind: "list", ordered, first: Number(first[1] ?? 1), items, end };
}

function nextIsItem(lines, blank, ordered) {
  const item = ITEM.exec(lines[blank + 1] ?? "");
  return item !== null && (item[1] !== undefined) === ordered;
}

function readParagraph(lines, start) {
  let end = start + 1;
  const starts = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  if (lines[start].trim() !== "") while (end < lines.length && lines[end].trim() !== "" && !starts(lines[end])) end++;
  return { kind: "paragraph", text: lines.slice(start, end).join("\n"), end };
}

const INLINE = /`([^`\n]+)`|\*\*(\S|\S[^*\n]*\S)\*\*|(?<![\w*])\*(\S|\S[^*\n]*\S)\*(?![\w*])/g;

/** Text with `code`, **bold** and *emphasis* as nodes. */
export function inlineNodes(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, bold, emphasis] = found;
    if (found.index > at) nodes.push(document.createTextNode(text.slice(at, found.index)));
    if (code !== undefined) nodes.push(element("code", code));
    else nodes.push(element(bold !== undefined ? "strong" : "em", bold ?? emphasis));
    at = found.index + whole.length;
  }
  if (at < text.length) nodes.push(document.createTextNode(text.slice(at)));
  return nodes;
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function codeBlock(block, copyButton) {
  const head = element("div", element("span", block.language || "code"), copyButton(() => block.text));
  head.className = "code-head";
  const code = element("pre", element("code", block.text));
  code.tabIndex = 0; // so that a keyboard can scroll it
  const figure = element("div", head, code);
  figure.className = "code-block";
  return figure;
}

function list(block) {
  const made = element(block.ordered ? "ol" : "ul", ...block.items.map((item) => element("li", ...inlineNodes(item))));
  if (block.ordered) made.start = block.first;
  return made;
}

function blockNode(block, copyButton) {
  if (block.kind === "code") return codeBlock(block, copyButton);
  if (block.kind === "list") return list(block);
  return element(block.kind === "heading" ? "h3" : "p", ...inlineNodes(block.text));
}

/** Draws growing text into `target`; blocks that did not change keep their nodes. */
export class MarkdownView {
  #drawn = [];

  constructor(target, copyButton) {
    this.target = target;
    this.copyButton = copyButton;
  }

  draw(text) {
    const blocks = parseBlocks(text);
    const sources = blocks.map((block) => block.source);
    let same = 0;
    while (same < sources.length && sources[same] === this.#drawn[same]) same++;
    while (this.target.childNodes.length > same) this.target.lastChild.remove();
    for (const block of blocks.slice(same)) this.target.append(blockNode(block, this.copyButton));
    this.#drawn = sources;
  }
}
