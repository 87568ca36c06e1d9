// Ties the parts of the page together.

import { Controls } from "./controls.js";
import { Conversation } from "./conversation.js";
import { ModelChoice } from "./models.js";
import { Status } from "./status.js";

const byId = (id) => document.getElementById(id);
const message = byId("message");

const controls = new Controls();
const models = new ModelChoice(() => status.restart());
const conversation = new Conversation(
  () => ({ request: { ...controls.request(), ...models.request() }, first: controls.firstMessages(), key: controls.key }),
  (busy) => {
    byId("send").hidden = busy;
    byId("stop-button").hidden = !busy;
  },
);
const status = new Status(
  () => controls.key,
  models,
  (info) => {
    byId("empty-model").textContent = info.model;
    document.title = `${info.model} · quantkit`;
    controls.limitTo(info.max_context);
  },
);

function fitHeight() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + message.offsetHeight - message.clientHeight}px`;
}

function send(text) {
  if (conversation.busy || text.trim() === "") return;
  conversation.send(text.trim());
}

function sendMessage() {
  if (conversation.busy) return;
  send(message.value);
  message.value = "";
  fitHeight();
  message.focus();
}

function show(view) {
  document.documentElement.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  sendMessage();
});
message.addEventListener("input", fitHeight);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendMessage();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") conversation.stop();
});
byId("stop-button").addEventListener("click", () => {
  conversation.stop();
  message.focus();
});
byId("clear").addEventListener("click", () => {
  conversation.clear();
  show("chat");
  message.focus();
});
byId("examples").addEventListener("click", (event) => {
  if (event.target.matches("button")) send(event.target.textContent);
});
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => show(button.dataset.show));
}
if (matchMedia("(min-width: 800px)").matches) message.focus(); // on a phone that would open the keyboard
