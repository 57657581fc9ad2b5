// Rollouts of releases, and what each device did with its bundle.

import { data, score, withholds } from "./data.js";
import { act, confirm, INTRODUCTION } from "./dialogs.js";
import { h } from "./dom.js";
import { section, untold } from "./fleet.js";
import { table } from "./table.js";
import { ago, byName, clock, driftPill, hint, link, number, pill, secret } from "./words.js";

export const facts = (pairs) =>
  h(
    "dl",
    {},
    pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );

export const stages = (at, n, state) =>
  h(
    "ol",
    { class: "stages", "aria-hidden": "true" },
    Array.from({ length: Math.min(n, 12) }, (_, k) =>
      h("li", { class: state === "done" || k + 1 < at ? "past" : k + 1 === at ? `now ${state}` : null }, String(k + 1)),
    ),
  );

let drafts = {}; // what was typed and chosen, by field

export function rollouts(detail) {
  if (detail.error) return section("Rollouts", null, h("p", { class: "error", role: "alert" }, detail.error));
  if (!detail.value) return section("Rollouts", "Loading…");
  const found = detail.value.rollouts;
  if (!found.length)
    return section("Rollouts", "No repository is shown here: name the folders of fedge release with --rollouts.");
  return found.map(rollout);
}

const scoreOf = ([id, d]) =>
  score().share
    ? compare(id, d, "accuracy", (x) => (100 * x).toFixed(1), "\u00a0%")
    : compare(id, d, "accuracy", (x) => number(x, 3));
const FIGURES = [
  ["latency", ([id, d]) => compare(id, d, "latency_ms", (x) => number(x, 1), "\u00a0ms", "load"), { kind: "n" }],
  ["free energy", ([id, d]) => compare(id, d, "free_energy", (x) => number(x, 2)), { kind: "n" }],
];

/** What each device did with its bundle, and why. */
export function devicesOf(r) {
  const lines = list(r);
  const hasFigures = lines.some(([, d]) => d.before || d.now); // those of personal bundles stay on the devices
  return table({
    id: `rollout:${r.rollout}`,
    rows: lines,
    key: ([id]) => id,
    columns: [
      ["device", ([id]) => link(id), { sort: ([id]) => id }],
      [
        "phase",
        ([, d]) => pill(d.phase === "kept" ? "kept its own" : d.phase),
        { kind: "s", sort: ([, d]) => d.phase, badge: true },
      ],
      ["release", ([, d]) => number(d.release), { kind: "n", sort: ([, d]) => d.release }],
      [
        "takes part",
        ([, d]) => (d.takes_part ? "yes" : "not yet"),
        { kind: "s", sort: ([, d]) => (d.takes_part ? 0 : 1) },
      ],
      ["why", ([, d]) => d.reason ?? "", { kind: "why" }],
      ...(hasFigures ? [[score().words, scoreOf, { kind: "n" }], ...FIGURES] : []),
      ["°C", ([id, d]) => untold(data.byId.get(id), "load", d.temperature_c, number(d.temperature_c)), { kind: "n" }],
      [
        "inputs",
        ([id, d]) => (d.drift ? driftPill(d.drift_kind) : withholds(data.byId.get(id), "use") ? secret() : "as ever"),
        { kind: "s" },
      ],
      ["heard", ([, d]) => ago(d.seen_at), { kind: "n", sort: ([, d]) => d.seen_at }],
    ],
  });
}

const list = (r) => Object.entries(r.devices ?? {}).sort((a, b) => byName(a[0], b[0]));

const NEXT = { pause: "Pause", resume: "Resume", abort: "Roll back", "go-on": "Supervise again" };

/** Buttons for what may be asked of a rollout or an introduction now. */
export const steer = (r) =>
  data.session.may_act
    ? r.actions
        .filter((name) => NEXT[name])
        .map((name) => act(NEXT[name], `rollout-${name}`, { rollout: r.rollout }, name === "abort" && "danger"))
    : [];

export const plainList = (texts) =>
  h(
    "ul",
    { class: "plain" },
    texts.map((text) => h("li", {}, text)),
  );

function rollout(r) {
  const { plan, progress } = r;
  const lines = list(r);
  const share = (x) => `${number(100 * x)} %`;
  const buttons = steer(r);
  const told = plan && [
    [
      "state",
      [
        pill(progress.state),
        r.supervised || progress.state === "done" || progress.state === "aborted" ? "" : " nobody supervises it now",
      ],
    ],
    ["release", plan.target ? `${plan.release} (${plan.target})` : String(plan.release)],
    [
      "stage",
      `${progress.stage + 1} of ${plan.stages.length}: ${lines.filter(([, d]) => d.takes_part).length} of ${lines.length} devices take part`,
    ],
    [
      "runs on",
      `${lines.filter(([, d]) => d.release === plan.release && (d.phase === "serving" || d.phase === "trial")).length} of ${lines.length} devices`,
    ],
    plan.canaries?.length > 0 && ["first", plan.canaries.join(", ")],
    ["stages", plan.stages.map((x) => (x ? share(x) : "those first")).join(", ")],
    ["since", ago(progress.began)],
    ["why", progress.reasons?.length ? plainList(progress.reasons) : "–"],
  ];
  const part = section(
    r.rollout === INTRODUCTION ? "Introduction" : `Rollout of ${r.rollout}`,
    plan ? null : "No rollout was started from this repository yet.",
    plan && stages(progress.stage + 1, plan.stages.length, progress.state),
    plan && facts(told),
    buttons?.length > 0 && h("div", { class: "bar" }, buttons),
    data.session.may_act && r.actions.includes("start") && starter(r),
    plan && [h("h3", {}, "Devices"), devicesOf(r)],
    r.events?.length > 0 && [
      h("h3", {}, "Events"),
      table({
        id: `rollout-events:${r.rollout}`,
        rows: r.events.slice(-100).reverse(),
        key: (e) => `${e.at}:${e.device}:${e.text}`,
        size: 10,
        columns: [
          ["when", (e) => clock(e.at), { kind: "s" }],
          ["device", (e) => (e.device ? link(e.device) : "")],
          ["what", (e) => e.text, { kind: "why" }],
        ],
      }),
    ],
    r.earlier?.length > 0 && [
      h("h3", {}, "Earlier rollouts"),
      table({
        id: `earlier:${r.rollout}`,
        rows: r.earlier.slice().reverse(),
        key: (e) => e.id,
        size: 10,
        columns: [
          ["rollout", (e) => e.id],
          ["release", (e) => e.target],
          ["state", (e) => pill(e.state), { kind: "s" }],
          ["ended", (e) => clock(e.began), { kind: "s" }],
          ["why", (e) => (e.reasons ?? []).join("; "), { kind: "why" }],
        ],
      }),
    ],
  );
  part.attributes["data-rollout"] = r.rollout;
  return part;
}

function compare(id, d, name, words, unit = "", kind = "loss") {
  // a figure of the bundle before, and of the one that is rolled out
  const [was, now] = [d.before?.[name], d.now?.[name]];
  if (was == null && now == null) return untold(data.byId.get(id), kind, null, "–");
  return `${was == null ? "" : `${words(was)} → `}${now == null ? "–" : words(now)}${unit}`;
}

function starter(r) {
  if (!r.targets.length) return hint("Nothing is released in this repository yet: fedge release add.");
  const kept = (name, value) => ({
    "data-key": `${name}:${r.rollout}`,
    "data-field": name,
    value: drafts[`${name}:${r.rollout}`] ?? value,
    oninput: (e) => {
      drafts[`${name}:${r.rollout}`] = e.target.value;
    },
  });
  return h(
    "form",
    {
      class: "bar start",
      onsubmit: (e) => {
        e.preventDefault();
        const body = Object.fromEntries(
          [...e.target.querySelectorAll("[data-field]")].map((field) => [field.dataset.field, field.value.trim()]),
        );
        confirm("Start the rollout", "rollout-start", { rollout: r.rollout, ...body }, false);
      },
    },
    h(
      "label",
      {},
      "release ",
      h(
        "select",
        kept("target", r.targets[0]),
        r.targets.map((value) =>
          h("option", { value }, r.aborted.includes(value) ? `${value}, which was aborted` : value),
        ),
      ),
    ),
    h("label", {}, "shares ", h("input", { placeholder: "as configured", size: "12", ...kept("stages", "") })),
    h("label", {}, "first ", h("input", { placeholder: "devices", size: "12", ...kept("canary", "") })),
    h("button", { "data-key": `a:rollout-start:${r.rollout}` }, "Start a rollout"),
  );
}
