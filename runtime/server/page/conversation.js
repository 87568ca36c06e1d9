// The conversation: turns of a question and an answer, how they are drawn, and how an answer streams in.

import { MarkdownView } from "./markdown.js";
import { streamChat } from "./stream.js";

const NEAR_END = 80; // pixels from the end within which new text is followed

const byId = (id) => document.getElementById(id);

function element(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

function button(label, action) {
  const made = element("button", "plain small", label);
  made.type = "button";
  made.addEventListener("click", () => action(made));
  return made;
}

async function copy(text, pressed) {
  let word = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    word = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  pressed.textContent = word;
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

/** The way that still works on pages without https, where browsers offer no clipboard. */
function copyBySelection(text) {
  const area = element("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

const copyButton = (text) => button("Copy", (pressed) => copy(text(), pressed));

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** How one answer went: counts and times, as the reader saw them. */
class Timing {
  #sent = performance.now();
  #first = null;
  #last = null;
  pieces = 0;

  piece() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.pieces++;
  }

  describe(usage, ending) {
    const tokens = usage?.completion_tokens ?? this.pieces;
    const parts = [`${usage ? "" : "about "}${tokens} ${tokens === 1 ? "token" : "tokens"}`];
    const spent = (this.#last - this.#first) / 1000;
    if (tokens > 1 && spent > 0) parts.push(`${((tokens - 1) / spent).toFixed(1)} tokens/s`);
    if (this.#first !== null) parts.push(`first token ${seconds(this.#first - this.#sent)}`);
    if (ending) parts.push(ending);
    return parts.join(" · ");
  }
}

/** A question with its answer, and the nodes that show them. */
class Turn {
  text = "";

  constructor(question, onRetry) {
    this.question = question;
    this.body = element("div", "answer-text");
    this.facts = element("p", "facts");
    this.actions = element("div", "actions", copyButton(() => this.text), button("Retry", onRetry));
    this.actions.lastChild.classList.add("retry");
    const foot = element("div", "foot", this.facts, this.actions);
    this.answer = element("article", "answer", this.body, foot);
    this.answer.setAttribute("aria-label", "Answer");
    const asked = element("div", "question", question);
    asked.setAttribute("aria-label", "You");
    asked.setAttribute("role", "article");
    this.node = element("section", "turn", asked, this.answer);
    this.begin();
  }

  begin() {
    this.text = "";
    this.body.replaceChildren();
    this.answer.querySelector(".error")?.remove();
    this.view = new MarkdownView(this.body, copyButton);
    this.facts.textContent = "";
    this.#busy(true);
  }

  draw() {
    this.view.draw(this.text);
  }

  end(facts) {
    this.draw();
    this.facts.textContent = facts;
    this.actions.firstChild.hidden = this.text === "";
    this.#busy(false);
  }

  fail(message) {
    const box = element("p", "error", message);
    box.setAttribute("role", "alert");
    this.body.after(box);
  }

  /** As messages of a request; a question that got no answer is left out. */
  messages() {
    const said = [{ role: "user", content: this.question }];
    return this.text ? [...said, { role: "assistant", content: this.text }] : [];
  }

  #busy(busy) {
    this.answer.setAttribute("aria-busy", String(busy));
    this.answer.classList.toggle("streaming", busy);
  }
}

export class Conversation {
  #turns = [];
  #abort = null;
  #follow = true;
  #top = 0; // where the view last was

  /** `ask()` gives { request, first, key }: what the settings say now. `onBusy(busy)` is told when an answer runs. */
  constructor(ask, onBusy) {
    this.ask = ask;
    this.onBusy = onBusy;
    this.log = byId("log");
    this.scroll = byId("scroll");
    this.scroll.addEventListener("scroll", () => this.#scrolled());
    new ResizeObserver(() => this.#keepUp()).observe(this.scroll);
    byId("newest").addEventListener("click", () => this.#toEnd());
  }

  get busy() {
    return this.#abort !== null;
  }

  send(question) {
    const turn = new Turn(question, () => this.#retry(turn));
    this.#turns.push(turn);
    this.log.append(turn.node);
    byId("empty").hidden = true;
    return this.#answer(turn);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.log.replaceChildren();
    byId("empty").hidden = false;
    this.#scrolled();
  }

  #retry(turn) {
    if (this.busy || turn !== this.#turns.at(-1)) return;
    turn.begin();
    this.#answer(turn);
  }

  async #answer(turn) {
    const abort = new AbortController();
    this.#abort = abort;
    this.onBusy(true);
    this.#toEnd();
    try {
      await this.#stream(turn, abort.signal);
    } finally {
      if (this.#abort === abort) {
        this.#abort = null;
        this.onBusy(false);
      }
      this.#keepUp();
    }
  }

  async #stream(turn, signal) {
    const { request, first, key } = this.ask();
    const before = this.#turns.slice(0, this.#turns.indexOf(turn)).flatMap((past) => past.messages());
    const messages = [...first, ...before, { role: "user", content: turn.question }];
    const timing = new Timing();
    let usage, ending;
    try {
      for await (const piece of streamChat({ ...request, messages }, key, signal)) {
        usage = piece.usage ?? usage;
        if (piece.finish === "length") ending = "reached the longest answer";
        if (!piece.text) continue;
        timing.piece();
        turn.text += piece.text;
        this.#drawSoon(turn);
      }
    } catch (error) {
      if (error.name === "AbortError") ending = "stopped";
      else turn.fail(error.message);
    }
    turn.end(turn.text || ending || usage ? timing.describe(usage, ending) : "");
  }

  /** Once a frame is enough, however fast tokens come. */
  #drawSoon(turn) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      turn.draw();
      this.#keepUp();
    });
  }

  #keepUp() {
    if (this.#follow) this.#toEnd();
    else this.#scrolled();
  }

  #toEnd() {
    this.#follow = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
    byId("newest").hidden = true;
  }

  #scrolled() {
    const below = this.scroll.scrollHeight - this.scroll.clientHeight - this.scroll.scrollTop;
    if (below < NEAR_END) this.#follow = true;
    else if (this.scroll.scrollTop < this.#top) this.#follow = false; // upwards: by hand
    this.#top = this.scroll.scrollTop;
    byId("newest").hidden = this.#follow;
  }
}
