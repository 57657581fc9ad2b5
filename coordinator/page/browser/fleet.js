// The fleet: what needs attention, the figures of all together, and its devices.

import { data, driftKind, drifts, findAccuracy, formatScore, getState, getWork, score, withholds } from "./data.js";
import { h } from "./dom.js";
import { change, look, table } from "./table.js";
import {
  ago,
  bytes,
  capital,
  count,
  driftPill,
  gigabytes,
  hint,
  link,
  meanings,
  number,
  percent,
  pill,
  secret,
  span,
  age,
  withCode,
} from "./words.js";

export const section = (title, about, ...children) =>
  h("section", { key: `s:${title}` }, h("h2", {}, title), about && hint(about), ...children);
export const tiles = (pairs) =>
  h(
    "div",
    { class: "tiles", key: "tiles" },
    pairs
      .filter(Boolean)
      .map(([name, value, under]) =>
        h("div", { key: name }, h("span", {}, name), h("strong", {}, value), under && h("small", {}, under)),
      ),
  );
/** A figure, or that its owner keeps it back. `kind`: of fedge egress. */
export const untold = (d, kind, value, words) => (value == null && withholds(d, kind) ? secret() : words);
export const context = (d, name, words) => untold(d, "load", d[`context.${name}`], words(d[`context.${name}`]));

export function accuracyCell(d) {
  const [share, where] = findAccuracy(d);
  if (share === null) return withholds(d, "loss") ? secret() : "–";
  return [formatScore(share), h("span", { class: "under" }, where)];
}

export function inputsCell(d) {
  if (drifts(d)) return driftPill(driftKind(d));
  return withholds(d, "use") ? secret() : d["health.phase"] ? "as ever" : "–";
}

export function stateCell(d) {
  return [pill(getState(d)), d.serving === "down" && [" ", pill("not answering")]];
}

// ------------------------------------------------------------------------------------------------------- attention

/** Kinds that a red line tells in every view. */
export const LOUD = ["coordinator-silent", "broker-unreachable"];
const SHOWN = 4; // matters of one kind that are shown one by one
const MOST = 12; // and those of a kind that are shown when it is opened

export function attention() {
  const all = (data.fleet.attention ?? []).filter((each) => !LOUD.includes(each.kind));
  if (!all.length) return null;
  const kinds = new Map();
  for (const each of all) {
    const key = `${each.severity}:${each.kind}`;
    kinds.has(key) ? kinds.get(key).push(each) : kinds.set(key, [each]);
  }
  const sorted = [...kinds].sort(([a], [b]) => (a.startsWith("error") ? 0 : 1) - (b.startsWith("error") ? 0 : 1));
  return h(
    "section",
    { key: "attention", class: "attention" },
    h("h2", {}, "Needs attention ", h("span", { class: "badge" }, number(all.length))),
    h(
      "ul",
      {},
      sorted.map(([key, members]) =>
        h("li", { key, class: members[0].severity }, members.length <= SHOWN ? members.map(one) : many(key, members)),
      ),
    ),
  );
}

const one = (each) =>
  h(
    "div",
    { key: `${each.kind}:${each.device}:${each.text}`, class: "matter" },
    h(
      "p",
      { class: "what" },
      each.device && [h("strong", {}, link(each.device)), " "],
      capital(each.text),
      each.since && h("span", { class: "soft" }, ` since ${span(age(each.since))}`),
    ),
    each.do && h("p", { class: "do" }, withCode(capital(each.do))),
  );

/** What is said of several devices at once, by kind. */
const MANY = {
  "two-processes": "have two processes each, which take turns",
  "serve-down": "answer nobody: their fedge serve is down",
  refused: "send what is refused",
  "failed-repeatedly": "fail one order after the other",
  "bundle-refused": "refused a bundle, went back, or could not fetch it",
  quarantined: "are in quarantine",
  "disk-near-full": "have a disk that is nearly full",
  offline: "are away for longer than is usual for them",
  drifting: "see something else than their bundle learned",
  "wrong-clock": "have another time than the coordinator",
};

function many(key, members) {
  const oldest = Math.min(...members.map((each) => each.since ?? Infinity));
  return h(
    "details",
    { key },
    h(
      "summary",
      {},
      h("strong", {}, count(members.length, "device")),
      ` ${MANY[members[0].kind] ?? members[0].kind.replaceAll("-", " ")}`,
      Number.isFinite(oldest) && h("span", { class: "soft" }, ` the longest since ${span(age(oldest))}`),
      members.every((each) => each.do === members[0].do) && h("p", { class: "do" }, withCode(capital(members[0].do))),
    ),
    members.slice(0, MOST).map(one),
    members.length > MOST && hint(`And ${number(members.length - MOST)} more; fedge status lists them all.`),
  );
}

// -------------------------------------------------------------------------------------------------------- overview

/** An accuracy of the fleet, and of what it is. The one that is shown first is the bundles' that answer. */
const accuracyTile = ({ of, share, n, devices }) =>
  of === "at work"
    ? [`${score().words} at work`, formatScore(share), `${number(n)} answers labelled later`]
    : of === "in training"
      ? ["in training", formatScore(share), "last cohort"]
      : [`${score().words} of bundles`, formatScore(share), `validation, on ${count(devices, "device")}`];

const roundNote = ({ paused, stopped, best }) =>
  paused ? "paused" : stopped == null ? "" : `stopped early, ${number(best)} is best`;

function overview() {
  const { fleet, devices } = data;
  const online = devices.filter((d) => d.presence === "online").length;
  const isKnown = !devices.length || devices.some((d) => d.presence !== "unknown");
  return tiles([
    ["devices online", isKnown ? `${number(online)} of ${number(devices.length)}` : "unknown"],
    fleet.campaign && ["campaign", number(fleet.campaign.number), fleet.campaign.state],
    ["round", `${number(fleet.stopped ?? fleet.round)} of ${number(fleet.rounds)}`, roundNote(fleet)],
    ...(fleet.shown?.length ? fleet.shown.map(accuracyTile) : [[score().words, "–"]]),
    ["with a bundle", number(devices.filter((d) => d.bundle || d.release).length)],
    ["samples", number(devices.reduce((n, d) => n + (d.n_samples ?? 0), 0))],
    ["from devices", bytes(fleet.bytes_up), `to them ${bytes(fleet.bytes_down)}`],
  ]);
}

// --------------------------------------------------------------------------------------------------------- devices

const needsLook = () => new Set((data.fleet.attention ?? []).map((each) => each.device));
const FILTERS = {
  all: ["all devices", () => true],
  online: ["online", (d) => d.presence === "online"],
  offline: ["offline", (d) => d.presence === "offline"],
  sleeping: ["sleeping", (d) => d.presence === "sleeping"],
  unknown: ["unknown", (d) => d.presence === "unknown"],
  trouble: ["with something to say", (d, marked) => (d.why !== "" && d.why != null) || marked.has(d.id)],
  drift: ["drifting", drifts],
  out: ["retired or in quarantine", (d) => ["retired", "in quarantine"].includes(getState(d))],
};
const GROUPS = {
  "": ["no groups", null],
  state: ["state", getState],
  cluster: ["expert", (d) => (d.clusters?.length ? `expert ${d.clusters.join(" and ")}` : "no expert yet")],
  bundle: ["bundle", (d) => (d.release ? `release ${d.release}` : "no bundle")],
  inputs: ["inputs", (d) => (drifts(d) ? "drift" : "as ever")],
};

const SCORE = "accuracy"; // the column whose heading is the name of the score
const COLUMNS = [
  ["device", (d) => link(d.id), { sort: (d) => d.id }],
  ["state", stateCell, { sort: getState, kind: "s", badge: true }],
  ["heard", (d) => ago(d.seen_at), { kind: "n", sort: (d) => d.seen_at, about: "When it last sent anything" }],
  [
    SCORE,
    accuracyCell,
    {
      kind: "n self",
      sort: (d) => findAccuracy(d)[0],
      about: "Of the bundle that answers, as far as it is known; else of the model in training",
    },
  ],
  [
    "inputs",
    inputsCell,
    { kind: "s", sort: (d) => (drifts(d) ? 1 : 0), about: "Whether what it sees is like its samples" },
  ],
  ["bundle", (d) => (d.release ? `release ${d.release}` : "none"), { kind: "n", sort: (d) => d.release }],
  ["this round", (d) => (d.now ? pill(d.now) : "–"), { kind: "s", sort: (d) => d.now || null }],
  ["load", (d) => context(d, "load", (x) => number(x, 2)), { kind: "n", sort: (d) => d["context.load"] }],
  ["free RAM", (d) => context(d, "free_ram_gb", gigabytes), { kind: "n", sort: (d) => d["context.free_ram_gb"] }],
  ["°C", (d) => context(d, "temperature_c", number), { kind: "n", sort: (d) => d["context.temperature_c"] }],
  ["why", (d) => d.why && h("span", { class: "clamp", title: d.why }, d.why), { kind: "why" }],
];

export function fleet() {
  const set = look("fleet", { sort: "device" });
  const words = set.words.toLowerCase();
  const marked = needsLook();
  const [, fits] = FILTERS[set.only];
  const chosen = data.devices.filter(
    (d) => (d.id.toLowerCase().includes(words) || (d.why ?? "").toLowerCase().includes(words)) && fits(d, marked),
  );
  const options = (found) => Object.entries(found).map(([value, [name]]) => h("option", { value }, name));
  const bar = h(
    "div",
    { class: "bar", key: "bar" },
    h("input", {
      type: "search",
      placeholder: "Find a device",
      "aria-label": "Find a device",
      "data-key": "search",
      value: set.words,
      oninput: (e) => change("fleet", { words: e.target.value }),
    }),
    h(
      "select",
      {
        "aria-label": "Which devices",
        "data-key": "only",
        value: set.only,
        onchange: (e) => change("fleet", { only: e.target.value }),
      },
      options(FILTERS),
    ),
    h(
      "label",
      {},
      "by ",
      h(
        "select",
        {
          "aria-label": "Groups",
          "data-key": "group",
          value: set.group,
          onchange: (e) => change("fleet", { group: e.target.value, folded: new Set() }),
        },
        options(GROUPS),
      ),
    ),
    h("span", { class: "soft" }, `${number(chosen.length)} of ${number(data.devices.length)}`),
  );
  return [
    attention(),
    overview(),
    section(
      "Devices",
      null,
      bar,
      table({
        id: "fleet",
        columns: COLUMNS.map(([name, ...rest]) => [name === SCORE ? score().words : name, ...rest]),
        rows: chosen,
        key: (d) => d.id,
        group: GROUPS[set.group][1],
        empty: data.devices.length
          ? "No device is like that."
          : "No device has shown itself yet. Start one with fedge agent.",
      }),
    ),
  ];
}

// --------------------------------------------------------------------------------------------------------- samples

const explainSamples = () => [
  ["may be used", "samples from which the device may learn"],
  [
    "kept apart",
    `samples on which it tries a bundle before it uses it; ${score().words} there: of the bundle that answers`,
  ],
  ["at work", "share of right answers among those that somebody labelled later"],
  ["shift", "how far its inputs lie from the bundle's own samples, in their deviations; above 1 it sees something else"],
  ["outliers", "share of predictions for inputs that are unlike the bundle's own samples"],
];

export function samples() {
  const usable = data.devices.reduce((n, d) => n + (d.n_samples ?? 0), 0);
  const sum = (name) => data.devices.reduce((n, d) => n + (d[`health.${name}`] ?? 0), 0);
  const use = (d, name) =>
    untold(d, "use", withholds(d, "use") ? null : d[`health.${name}`], number(d[`health.${name}`]));
  const measured = (d, name, words) => untold(d, "loss", d[`health.now.${name}`], words(d[`health.now.${name}`]));
  return [
    tiles([
      ["may be used to train", number(usable)],
      ["devices that tell how many", number(data.devices.filter((d) => d.n_samples != null).length)],
      ["predictions", number(sum("n_predictions")), `${number(sum("n_failed"))} failed`],
      ["devices whose inputs drift", number(data.devices.filter(drifts).length)],
    ]),
    section(
      "Samples",
      "What devices say of their data, and of what their bundle has seen and answered.",
      table({
        id: "samples",
        begin: { sort: "device" },
        rows: data.devices,
        key: (d) => d.id,
        columns: [
          ["device", (d) => link(d.id), { sort: (d) => d.id }],
          [
            "may be used",
            (d) => untold(d, "count", d.n_samples, number(d.n_samples)),
            { kind: "n", sort: (d) => d.n_samples },
          ],
          ["share", (d) => (d.n_samples == null || !usable ? "–" : percent(d.n_samples / usable)), { kind: "n" }],
          [
            "kept apart",
            (d) => untold(d, "count", d["health.now.n"] || null, number(d["health.now.n"])),
            { kind: "n", sort: (d) => d["health.now.n"] },
          ],
          [
            `${score().words} there`,
            (d) => measured(d, "accuracy", formatScore),
            { kind: "n", sort: (d) => d["health.now.accuracy"] },
          ],
          [
            "at work",
            (d) => {
              const work = getWork(d);
              return work.n
                ? [percent(work.recent ?? work.right / work.n), h("span", { class: "under" }, `of ${number(work.n)}`)]
                : "–";
            },
            {
              kind: "n",
              sort: (d) => {
                const work = getWork(d);
                return work.n ? (work.recent ?? work.right / work.n) : null;
              },
            },
          ],
          [
            "shift",
            (d) => measured(d, "free_energy", (x) => number(x, 2)),
            { kind: "n", sort: (d) => d["health.now.free_energy"] },
          ],
          ["predictions", (d) => use(d, "n_predictions"), { kind: "n", sort: (d) => d["health.n_predictions"] }],
          ["failed", (d) => use(d, "n_failed"), { kind: "n", sort: (d) => d["health.n_failed"] }],
          [
            "outliers",
            (d) => untold(d, "use", d.outliers, percent(d.outliers)),
            { kind: "n", sort: (d) => d.outliers },
          ],
          ["inputs", inputsCell, { kind: "s", sort: (d) => (drifts(d) ? 1 : 0) }],
        ],
      }),
      meanings(explainSamples()),
    ),
  ];
}
