// What is asked for and done: dialogs with their errors in them, logging in and out, actions.

import { data, forget, post, readSession } from "./data.js";
import { h, patch } from "./dom.js";
import { capital } from "./words.js";

let dialog = null; // what is asked: title, what it means, a field, the button, and what the button does
let done = async () => {}; // what follows an action
export const onDone = (work) => {
  done = work;
};
const box = () => document.getElementById("dialog");

export function notice(text, isBad = false) {
  const line = document.getElementById("notice");
  line.textContent = text;
  line.hidden = !text;
  line.className = isBad ? "bad" : "";
}

function open(asked) {
  if (box().open) box().close();
  dialog = { error: "", busy: false, ...asked };
  patch(box(), []); // another dialog begins without the words of the last one
  draw();
  box().showModal();
  box().querySelector("input, .cancel")?.focus(); // never what destroys something
}

function draw() {
  const { title, means, field, words, isDanger, error, busy } = dialog;
  patch(
    box(),
    h(
      "form",
      { onsubmit: perform, "aria-labelledby": "asked" },
      h("h2", { id: "asked" }, title),
      means && h("p", { class: "hint" }, means),
      field?.(),
      h("p", { class: "error", role: "alert", hidden: !error }, error),
      h(
        "div",
        { class: "bar end" },
        h("button", { type: "button", class: "cancel", onclick: close }, "Cancel"),
        h(
          "button",
          {
            type: field ? "submit" : "button",
            id: "confirm",
            class: isDanger ? "danger" : "main",
            disabled: busy,
            onclick: field ? null : perform,
          },
          busy ? "…" : words,
        ),
      ),
    ),
  );
}

const close = () => box().close();

async function perform(event) {
  event.preventDefault();
  if (dialog.busy) return;
  const own = dialog;
  Object.assign(own, { busy: true, error: "" });
  draw();
  try {
    await own.work(event);
    if (dialog === own) close();
  } catch (error) {
    Object.assign(own, { busy: false, error: capital(error.message) });
    if (dialog === own) draw();
    box().querySelector("input")?.select();
  }
}

/** The name of the introduction among the rollouts. */
export const INTRODUCTION = "introduction";

const MEANINGS = {
  "rollout-abort": (body) =>
    `The devices that run ${body.rollout === INTRODUCTION ? "a new bundle" : "the release"} go back to the bundle before.`,
  "rollout-start": () => "The first devices begin with it at once.",
  retire: (body) => `${body.device} gets no more orders. Its installed bundle goes on answering.`,
  recluster: () => "All clusters are made anew in the next round.",
  finish: () => "The training ends with the round under way, and devices get their bundles.",
  "campaign-run": () => "Devices train again, from the models of the last campaign.",
};

/** A button for an action. `asks`: whether one is asked first; "danger" if the action takes something away. */
export function act(words, name, body = {}, asks = false) {
  return h(
    "button",
    {
      type: "button",
      class: asks === "danger" ? "danger" : null,
      key: `a:${name}:${body.device ?? body.rollout ?? ""}`,
      "data-key": `a:${name}:${body.device ?? body.rollout ?? ""}`,
      onclick: () => (asks ? confirm(words, name, body, asks === "danger") : send(name, body)),
    },
    words,
  );
}

export function confirm(words, name, body, isDanger = true) {
  const about = body.rollout ? ` (${body.rollout}${body.target ? `, ${body.target}` : ""})` : "";
  open({
    title: `${words}${about}?`,
    means: MEANINGS[name]?.(body),
    words,
    isDanger,
    work: () => perform_(name, body),
  });
}

async function perform_(name, body) {
  const told = await post(`api/actions/${name}`, body);
  notice(told.text ?? "");
  await done();
}

async function send(name, body) {
  try {
    await perform_(name, body);
  } catch (error) {
    notice(`That was refused: ${error.message}`, true);
  }
}

export const isAsking = () => box().open;

export function login(begin) {
  if (box().open) return;
  open({
    title: "Log in",
    words: "Log in",
    means:
      "The token is in the file ui-token of the coordinator's home, or what --token of fedge ui or token in [ui] of the configuration says.",
    field: () =>
      h("input", {
        key: "token",
        type: "password",
        name: "token",
        autocomplete: "current-password",
        "aria-label": "Token",
        required: true,
      }),
    work: async (event) => {
      await post("api/login", { token: event.target.elements.token.value });
      await begin();
    },
  });
}

export async function logout(begin) {
  try {
    await post("api/logout", {});
  } catch (error) {
    notice(`Nobody was logged out: ${error.message}`, true);
    return;
  }
  forget();
  notice("You are logged out.");
  await readSession();
  await begin();
}
