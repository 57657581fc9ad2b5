// Figures and names in words.

import { h } from "./dom.js";

export const UNTOLD = "not told by its owner";
export const secret = () => h("span", { class: "untold" }, UNTOLD);
export const isSecret = (told) => told?.attributes?.class === "untold";

const JOIN = "\u00a0"; // between a figure and its unit no line ends
export const number = (x, digits = 0) =>
  x === null || x === undefined ? "–" : x.toLocaleString("en", { maximumFractionDigits: digits });
export const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)}${JOIN}%`);
export const bytes = (x) =>
  x == null
    ? "–"
    : x < 1000
      ? `${x}${JOIN}B`
      : x >= 1e9
        ? `${(x / 1e9).toFixed(2)}${JOIN}GB`
        : x >= 1e6
          ? `${(x / 1e6).toFixed(2)}${JOIN}MB`
          : `${(x / 1e3).toFixed(1)}${JOIN}kB`;
export const gigabytes = (x) => (x == null ? "–" : `${number(x, 1)}${JOIN}GB`);
export function span(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0) s = 0;
  if (s < 90) return `${Math.round(s)}${JOIN}s`;
  if (s < 5400) return `${Math.round(s / 60)}${JOIN}min`;
  return s < 172800 ? `${Math.round(s / 3600)}${JOIN}h` : `${Math.round(s / 86400)}${JOIN}days`;
}
export const took = (s) => (s !== null && s !== undefined && s < 10 ? `${number(s, 1)}${JOIN}s` : span(s));
export const capital = (text) => text && text[0].toUpperCase() + text.slice(1);
export const count = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
export const byName = new Intl.Collator("en", { numeric: true }).compare;
export const age = (at) => Date.now() / 1000 - at;
export const ago = (at) => (at ? `${span(age(at))}${JOIN}ago` : "–");
export const clock = (at) =>
  at
    ? new Date(at * 1000).toLocaleString("en-GB", {
        day: "numeric",
        month: "short",
        hour: "2-digit",
        minute: "2-digit",
        second: "2-digit",
      })
    : "–";

const KIND = {
  online: "good",
  answered: "good",
  sleeping: "warn",
  declined: "warn",
  unsupported: "warn",
  late: "warn",
  expired: "warn",
  asked: "",
  running: "good",
  resting: "",
  done: "good",
  serving: "good",
  paused: "warn",
  fetching: "warn",
  trial: "warn",
  kept: "good",
  "kept its own": "good",
  aborted: "bad",
  refused: "bad",
  rolled_back: "bad",
  "not answering": "bad",
  offline: "bad",
  failed: "bad",
  rejected: "bad",
  "in quarantine": "bad",
  retired: "bad",
};
export const pill = (word, kind = KIND[word] ?? "") =>
  h("span", { class: `pill ${kind}` }, String(word).replaceAll("_", " "));
export const link = (id) => h("a", { href: `#device/${encodeURIComponent(id)}`, "data-key": `d:${id}` }, id);
export const roundLink = (r) => h("a", { href: `#round/${r}`, "data-key": `r:${r}` }, String(r));
export const hint = (...words) => h("p", { class: "hint" }, words);
/** Words with commands in them, which stand between backticks. */
export const withCode = (text) => text.split("`").map((part, k) => (k % 2 ? h("code", {}, part) : part));

/** The kinds of drift, and what each means. */
export const DRIFTS = {
  shares: ["other class shares", "Some classes come more often than they did, and look as ever."],
  inputs: ["other inputs", "What the device sees no longer looks like its samples."],
  labels: ["other labels", "Inputs look as ever, and people give them other labels."],
};
export const driftPill = (kind) => {
  const [words, means] = DRIFTS[kind] ?? ["drift", "Inputs have left what the bundle was fitted to."];
  return h("span", { class: "pill bad", title: means }, words);
};

/** What a device does in each step, by the name that orders have. */
export const STEPS = {
  train: "trains the model on its own samples and sends the change",
  train_ditto: "trains the shared model, and a model of its own beside it",
  train_rod: "trains the shared model with a head of its own",
  train_dbe: "trains the shared model without its own mean features",
  train_babu: "trains the shared model but for its head",
  train_apfl: "trains the shared model, and a model of its own to mix with it",
  train_moon: "trains the shared model, away from its own last one",
  train_cp: "trains the shared model with a head of its own, and a policy between the two",
  train_gp: "trains the shared features, guided by embeddings of the classes, with a head of its own",
  train_gh: "trains its model, and sends the mean features of its classes",
  train_pfedme: "trains a model of its own, and the shared one after it",
  train_scaffold: "trains the shared model with corrected steps, and sends how its correction changed",
  train_feddyn: "trains the shared model, drawn to what suits all devices",
  train_dp: "trains, and adds noise before anything leaves it",
  train_masked: "trains, and masks its change so that only sums can be read",
  mask_keys: "makes keys for a masked sum",
  mask_shares: "deals out shares of its keys",
  confirm_sum: "confirms who is in the masked sum",
  unmask: "helps to take the masks off the sum",
  sum: "a site sums up the changes of its devices",
  profile: "describes its data by a profile, from which clusters are made",
  labels: "tells which class it has most of",
  describe_labels: "tells which class it has most of",
  label_shares: "tells what share each class has",
  mean: "sends the mean of its features",
  mean_features: "sends the mean of its features",
  trial: "compares the expert with the shared model on its validation samples",
  route: "tells which expert its samples go to",
  candidates: "fits the models that its bundle may use",
  fit_candidates: "fits the models that its bundle may use",
  weights: "measures how well the models mix",
  fit_weights: "measures how well the models mix",
  energy: "learns to tell inputs that it does not know",
  fit_energy: "learns to tell inputs that it does not know",
  local: "fits a model of its own samples alone",
  gate: "learns which model to trust for an input, and writes its bundle",
  fit_gate: "learns which model to trust for an input, and writes its bundle",
  share: "sends the part that it trained alone",
  share_private: "sends the part that it trained alone",
  pool: "fits a mixture of others' parts, and writes its bundle",
  fit_pool: "fits a mixture of others' parts, and writes its bundle",
  mixture: "fits its mixture of models, and writes its bundle",
  fit_mixture: "fits its mixture of models, and writes its bundle",
  install: "writes its bundle: the model with which it predicts",
  assemble: "installs a bundle that was made for it",
  install_bundle: "installs a bundle that was made for it",
  equip: "gets a bundle, although it does not train",
};
export const baseStep = (label) => label.replace(/(-\d+)+$/, "");
export function step(label) {
  const means = STEPS[baseStep(label)];
  return means ? h("abbr", { title: `The device ${means}.` }, label) : label;
}
/** Words that a table uses, each with what it means. */
export const meanings = (pairs) =>
  h(
    "dl",
    { class: "meanings" },
    pairs.map(([name, means]) => [h("dt", {}, name), h("dd", {}, means)]),
  );
/** The steps that occur, each with what it means. */
export function stepKey(labels) {
  const names = [...new Set(labels.map(baseStep))].filter((name) => STEPS[name]);
  return names.length > 0 && meanings(names.map((name) => [name, `the device ${STEPS[name]}`]));
}

/** Events by name. */
export const EVENTS = {
  round_begun: "round began",
  round_done: "round done",
  chosen: "devices chosen",
  asked: "orders sent",
  answer: "answer",
  closed: "order without result",
  problem: "problem",
  device: "device",
  waiting: "waiting for devices",
  paused: "paused",
  resumed: "resumed",
  recluster: "clusters made anew",
  recluster_refused: "clusters not made anew",
  second_coordinator: "second coordinator",
};
export const eventName = (name) => EVENTS[name] ?? name.replaceAll("_", " ");
