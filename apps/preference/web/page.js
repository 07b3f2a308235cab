// Keys, and answers that are kept until the server has stored them. Without this script the form works as it is.
"use strict";

const form = document.querySelector("form");
const button = form.querySelector("button");
const message = document.getElementById("message");
const questions = [...form.querySelectorAll("fieldset")];
const images = [...document.querySelectorAll(".images img")];
const KEYS = {
  1: "first", ArrowLeft: "first", 2: "second", ArrowRight: "second", 0: "neither", ArrowDown: "neither",
};
let sending = false;

const chosen = (question) => question.querySelector("input:checked");
const loaded = () => images.every((image) => image.complete && image.naturalWidth > 0);

function show() {
  const open = questions.find((question) => !chosen(question));
  for (const question of questions) question.classList.toggle("open", question === open);
  button.disabled = sending || open !== undefined || !loaded();
  document.body.dataset.ready = String(loaded());
}

function answer(value) {
  const open = questions.find((question) => !chosen(question));
  if (!open) return;
  open.querySelector(`input[value=${value}]`).checked = true;
  show();
}

function takeBack() {
  const answered = questions.filter(chosen);
  if (answered.length) chosen(answered[answered.length - 1]).checked = false;
  show();
}

async function send() {
  if (sending) return;
  sending = true;
  message.textContent = "";
  show();
  try {
    const response = await fetch(form.action, {
      method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
    });
    if (!response.ok) throw new Error(String(response.status));
    location.replace("/rate");
  } catch {
    sending = false;
    message.textContent = "Not saved yet: the server does not answer. Your choice is kept; press Next to try again.";
    show();
  }
}

form.addEventListener("change", show);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!button.disabled) send();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || sending) return;
  if (event.key in KEYS) answer(KEYS[event.key]);
  else if (event.key === "Backspace") takeBack();
  else if (event.key === "Enter" && !button.disabled) send();
  else return;
  event.preventDefault();
});
for (const image of images) {
  image.addEventListener("load", show);
  image.addEventListener("error", () => {
    message.textContent = "An image did not load. Reload the page; your earlier answers are saved.";
  });
}
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.replace("/rate");
});
show();
