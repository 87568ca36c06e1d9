// Which of the models of this server answers. A server with one shows no choice, and needs no name in a request.

const select = document.getElementById("model");

/** `onChange()` is told when another one was chosen. */
export class ModelChoice {
  constructor(onChange) {
    select.addEventListener("change", onChange);
  }

  /** The names that the server has, the first of which answers until another one is chosen. */
  offer(names) {
    if (names.length < 2 || names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
    select.hidden = false;
  }

  /** Fields of a request. */
  request() {
    return select.value ? { model: select.value } : {};
  }

  /** What /page/status is asked with. */
  query() {
    return select.value ? `?model=${encodeURIComponent(select.value)}` : "";
  }
}
