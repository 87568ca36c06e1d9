// What the user set: sampling, system prompt, stop strings (kept in this browser) and the API key (kept in this tab).

const STORED = "quantkit.settings";
const STORED_KEY = "quantkit.key";

// An empty field is left out of the request: the server decides.
const CONTROLS = [
  { name: "temperature", label: "Temperature", value: 0.7, min: 0, max: 2, step: 0.1, hint: "0: always the likeliest" },
  { name: "top_p", label: "Top p", value: 0.95, min: 0.01, max: 1, step: 0.05, hint: "Only the likeliest, up to this share" },
  { name: "max_tokens", label: "Max tokens", value: 512, min: 1, step: 64, hint: "Longest answer" },
  { name: "top_k", label: "Top k", value: 0, min: 0, step: 1, hint: "Only so many; 0: all", more: true },
  { name: "min_p", label: "Min p", value: 0, min: 0, max: 1, step: 0.01, hint: "Drops what is far less likely", more: true },
  { name: "seed", label: "Seed", value: null, step: 1, hint: "Repeats an answer", placeholder: "random", more: true },
  { name: "repetition_penalty", label: "Repetition penalty", value: 1, min: 0.01, step: 0.05, hint: "Above 1: fewer repeats", more: true },
  { name: "presence_penalty", label: "Presence penalty", value: 0, min: -2, max: 2, step: 0.1, hint: "For what was used before", more: true },
  { name: "frequency_penalty", label: "Frequency penalty", value: 0, min: -2, max: 2, step: 0.1, hint: "For each time it was used", more: true },
];

const byId = (id) => document.getElementById(id);

function stored(storage, key) {
  try {
    return storage().getItem(key);
  } catch {
    return null; // storage is switched off in this browser
  }
}

function store(storage, key, value) {
  try {
    storage().setItem(key, value);
  } catch {
    // then it is not remembered
  }
}

const local = () => localStorage;
const session = () => sessionStorage;

function remembered() {
  try {
    return JSON.parse(stored(local, STORED)) ?? {};
  } catch {
    return {}; // not what this page wrote
  }
}

function controlRow({ name, label, min, max, step, hint, placeholder }) {
  const input = document.createElement("input");
  Object.assign(input, { type: "number", id: name, step, placeholder: placeholder ?? "server" });
  input.setAttribute("aria-describedby", `${name}-hint`);
  input.inputMode = "decimal";
  if (min !== undefined) input.min = min;
  if (max !== undefined) input.max = max;
  const title = Object.assign(document.createElement("label"), { htmlFor: name, textContent: label });
  title.className = "field-label";
  const note = Object.assign(document.createElement("p"), { id: `${name}-hint`, textContent: hint });
  note.className = "hint";
  const row = document.createElement("div");
  row.className = "control";
  row.append(title, note, input);
  return row;
}

/** The settings form. */
export class Controls {
  #contextTokens = Infinity;

  constructor() {
    for (const control of CONTROLS) {
      byId(control.more ? "more-controls" : "controls").append(controlRow(control));
    }
    this.#fill(remembered());
    byId("key").value = stored(session, STORED_KEY) ?? "";
    byId("settings").addEventListener("input", () => this.#remember());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => this.#reset());
  }

  get key() {
    return byId("key").value.trim();
  }

  /** A small model cannot give the usual longest answer: half of its context is left for the conversation. */
  limitTo(contextTokens) {
    this.#contextTokens = contextTokens;
    byId("max_tokens").max = contextTokens;
    const input = byId("max_tokens");
    if (Number(input.value) >= contextTokens) input.value = this.#initial("max_tokens");
  }

  /** Fields of a request that follow from the form. */
  request() {
    const fields = {};
    for (const { name } of CONTROLS) {
      const value = byId(name).value;
      if (value !== "") fields[name] = Number(value);
    }
    const stop = byId("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
    if (stop.length) fields.stop = stop;
    return fields;
  }

  /** The system prompt as the beginning of a conversation. */
  firstMessages() {
    const content = byId("system").value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #initial(name) {
    const value = CONTROLS.find((control) => control.name === name).value;
    return name === "max_tokens" ? Math.min(value, Math.floor(this.#contextTokens / 2)) : (value ?? "");
  }

  #fill(values) {
    for (const { name } of CONTROLS) byId(name).value = values[name] ?? this.#initial(name);
    byId("system").value = values.system ?? "";
    byId("stop").value = values.stop ?? "";
  }

  #reset() {
    this.#fill({ system: byId("system").value });
    this.#remember();
  }

  #remember() {
    const names = [...CONTROLS.map((control) => control.name), "system", "stop"];
    store(local, STORED, JSON.stringify(Object.fromEntries(names.map((name) => [name, byId(name).value]))));
    store(session, STORED_KEY, byId("key").value);
  }
}
