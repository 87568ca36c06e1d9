// What is served and how it does, asked for once a second while the page is visible.

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const POINTS = 60; // a minute of the sparkline
const MOMENTARY = ["tokens-per-second", "running", "waiting", "kv-percent"];

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

const known = (value, show) => (value === null || value === undefined ? "–" : show(value));
const whole = (value) => known(value, (v) => number.format(v));
const percent = (value) => known(value, (v) => `${v.toFixed(v > 0 && v < 10 ? 1 : 0)} %`);
const milliseconds = (value) =>
  known(value, (v) => (v < 1000 ? `${v.toFixed(v < 10 ? 1 : 0)} ms` : `${(v / 1000).toFixed(2)} s`));
const speed = (value) => known(value, (v) => (v > 0 && v < 100 ? v.toFixed(1) : number.format(v)));
const tokens = (value) => known(value, (v) => `${(v < 1e6 ? number : compact).format(v)} tokens`);

function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(value, 1)) / 3));
  return `${(value / 1000 ** step).toFixed(step ? 2 : 0)} ${units[step]}`;
}

function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text; // unchanged numbers stay selectable
}

function fillRows(target, rows) {
  const shown = JSON.stringify(rows);
  if (target.dataset.shown === shown) return;
  target.dataset.shown = shown;
  target.replaceChildren(
    ...rows.map(([name, value, kind]) => {
      const row = document.createElement("div");
      const term = Object.assign(document.createElement("dt"), { textContent: name });
      const detail = Object.assign(document.createElement("dd"), { textContent: value, className: kind ?? "" });
      row.append(term, detail);
      return row;
    }),
  );
}

function modelRows(info, version) {
  const cache = info.kv_dtype && info.kv_dtype !== info.dtype ? `${tokens(info.kv_tokens)}, ${info.kv_dtype}` : tokens(info.kv_tokens);
  return [
    ["Name", info.model],
    ["Format", info.format],
    ["Bits per weight", known(info.bits, (bits) => String(Number(bits.toFixed(2))))],
    ["Weights", known(info.weights_bytes, bytes)],
    ["Device", info.device],
    ["Computes in", info.dtype],
    ["Context", tokens(info.max_context)],
    ["Cache", cache],
    ["At the same time", known(info.max_sequences, (most) => `${most} answers`)],
    ["quantkit", version],
  ].filter(([, value]) => value !== "–");
}

/** The comparison of a share of answers with the unquantized model. */
function qualityRows({ compared, divergence, agreement, nan_alarms, repetition_alarms }) {
  const measured = (value, show) => (compared ? known(value, show) : "–");
  const alarm = (name, count) => [name, whole(count), count ? "bad" : undefined];
  return [
    ["KL divergence", measured(divergence, (nats) => `${nats.toPrecision(3)} nats`)],
    ["Top-1 agreement", measured(agreement, (share) => `${(100 * share).toFixed(1)} %`)],
    ["Answers compared", whole(compared)],
    alarm("Not-a-number alarms", nan_alarms),
    alarm("Repetition alarms", repetition_alarms),
  ];
}

/** Four rows for each GPU; what it does not tell is left out. */
function gpuRows(gpus) {
  return gpus.flatMap((gpu) => {
    const name = (what) => (gpus.length > 1 ? `${what}, ${known(gpu.index, String)}` : what);
    return [
      [name("Busy"), percent(gpu.utilization === null ? null : 100 * gpu.utilization)],
      [name("Memory"), known(gpu.memory_used, (used) => `${bytes(used)} of ${bytes(gpu.memory_total)}`)],
      [name("Power"), known(gpu.power_watts, (watts) => `${whole(watts)} of ${whole(gpu.power_limit_watts)} W`)],
      [name("Temperature"), known(gpu.temperature, (celsius) => `${celsius} °C`)],
    ].filter(([, value]) => value !== "–");
  });
}

function drawSparkline(values) {
  const [width, height] = [240, 48];
  const top = Math.max(...values, 1) * 1.1;
  const x = (index) => (width * (index + POINTS - values.length)) / (POINTS - 1);
  const y = (value) => height - 1 - ((height - 2) * value) / top;
  const line = values.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  byId("spark").querySelector(".line").setAttribute("d", line);
  byId("spark").querySelector(".area").setAttribute("d", `${line}L${width} ${height}L${x(0).toFixed(1)} ${height}Z`);
}

/** Asks and draws; `onInfo(info)` is told what is served whenever that is new. */
export class Status {
  #speeds = [];
  #served = "";

  constructor(key, models, onInfo) {
    this.key = key;
    this.models = models;
    this.onInfo = onInfo;
    this.#loop();
    document.addEventListener("visibilitychange", () => document.hidden || this.#ask());
  }

  /** Another model was chosen: the line of speeds is not its own. */
  restart() {
    this.#speeds = [];
    this.#ask();
  }

  async #loop() {
    for (;;) {
      if (!document.hidden) await this.#ask();
      await new Promise((wake) => setTimeout(wake, EVERY_MS));
    }
  }

  async #ask() {
    try {
      const headers = this.key() ? { Authorization: `Bearer ${this.key()}` } : {};
      const asked = this.models.query();
      const response = await fetch(`/page/status${asked}`, { headers, signal: AbortSignal.timeout(PATIENCE_MS) });
      const found = response.ok ? await response.json() : null;
      if (asked !== this.models.query()) return; // chosen meanwhile, and asked for again
      if (found) this.#draw(found);
      else this.#state("bad", response.status === 401 ? "needs an API key" : `status ${response.status}`);
    } catch {
      this.#state("bad", "server not reachable");
    }
  }

  #state(kind, words) {
    byId("state-dot").className = `dot ${kind}`;
    setText("state", words);
    if (kind === "bad") for (const id of MOMENTARY) setText(id, "–"); // the last ones are no longer true
  }

  #draw({ info, live, shadow, gpus, ready, models, version }) {
    this.models.offer(models);
    if (!info) return this.#state("wait", "engine is starting");
    const summary = [info.model, info.format, info.device].join(" · ");
    if (ready === false) this.#state("wait", "engine is restarting");
    else this.#state("good", summary);
    if (summary !== this.#served) this.onInfo(info);
    this.#served = summary;
    fillRows(byId("model-rows"), modelRows(info, version));
    this.#drawLive(live, info);
    byId("gpus").hidden = !gpus.length;
    fillRows(byId("gpu-rows"), gpuRows(gpus));
    byId("quality").hidden = !shadow;
    if (shadow) fillRows(byId("quality-rows"), qualityRows(shadow));
  }

  #drawLive(live, info) {
    this.#speeds = [...this.#speeds, live.tokens_per_second ?? 0].slice(-POINTS);
    drawSparkline(this.#speeds);
    setText("tokens-per-second", speed(live.tokens_per_second));
    setText("tab-speed", live.running ? `${speed(live.tokens_per_second)}/s` : "");
    setText("ttft", milliseconds(live.ttft_ms_p50));
    setText("itl", milliseconds(live.itl_ms_p50));
    setText("running", whole(live.running));
    setText("waiting", whole(live.waiting));
    setText("prefix", percent(live.prefix_hit_percent));
    setText("restarts", whole(live.restarts));
    byId("restarts").className = live.restarts ? "bad" : "";
    for (const node of document.querySelectorAll(".guesses")) node.hidden = !info.speculates;
    setText("guesses-right", percent(live.acceptance_percent));
    setText("tokens-per-step", known(live.tokens_per_step, (v) => v.toFixed(2)));
    const used = live.kv_percent ?? 0;
    setText("kv-percent", `${percent(live.kv_percent)} of ${tokens(info.kv_tokens)}`);
    byId("kv-bar").setAttribute("aria-valuenow", used.toFixed(1));
    byId("kv-bar").firstElementChild.style.width = `${Math.min(used, 100)}%`;
    byId("kv-bar").classList.toggle("full", used > 90);
  }
}
