// Campaigns, the introduction of what they learned, and rollouts of releases.

import { chart } from "./chart.js";
import { data, withholds } from "./data.js";
import { act, confirm } from "./dialogs.js";
import { h } from "./dom.js";
import { section, untold } from "./fleet.js";
import { table } from "./table.js";
import {
  ago,
  byName,
  capital,
  clock,
  count,
  driftPill,
  hint,
  link,
  number,
  percent,
  pill,
  secret,
  span,
  age,
} from "./words.js";

const can = (name) => data.session.may_act && data.fleet.actions.includes(name);
const facts = (pairs) =>
  h(
    "dl",
    {},
    pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );

// ------------------------------------------------------------------------------------------------------- campaigns

export function campaigns() {
  const c = data.fleet.campaign;
  if (!c) return section("Campaigns", "This coordinator has had no campaign yet.");
  const rests = c.state === "resting";
  const next = c.next_at
    ? age(c.next_at) < 0
      ? `in ${span(-age(c.next_at))}, at ${clock(c.next_at)}`
      : "is due"
    : rests
      ? "when somebody or a rule asks for it"
      : "–";
  return [
    h(
      "div",
      { class: "pair", key: "pair" },
      section(
        `Campaign ${number(c.number)}`,
        "A campaign is some rounds of training from the state of the last one, and ends in bundles.",
        facts([
          ["state", pill(c.state)],
          ["why it began", capital(c.why || "") || "–"],
          ["began", `${clock(c.began_at)}, ${ago(c.began_at)}`],
          c.ended_at && ["ended", `${clock(c.ended_at)}, after ${span(c.ended_at - c.began_at)}`],
          !rests && ["round", `${number(data.fleet.round)} of ${number(data.fleet.rounds)}`],
          ["next", next],
        ]),
        h(
          "div",
          { class: "bar" },
          rests && can("campaign-run") && act("Begin a campaign", "campaign-run"),
          c.state === "running" && can("finish") && act("Finish now", "finish", {}, true),
        ),
      ),
      introduction(),
    ),
    history(c.history ?? []),
  ];
}

function history(all) {
  if (!all.length) return null;
  const points = all.filter((each) => each.accuracy != null).map((each) => [each.number, each.accuracy]);
  return section(
    "Earlier campaigns",
    null,
    points.length > 1 &&
      chart({
        id: "campaigns",
        label: "Accuracy by campaign",
        tall: 180,
        unit: "campaign",
        hasRanges: false,
        lines: [{ name: "accuracy", points, color: "var(--accent)", wide: true }],
        times: new Map(all.map((each) => [each.number, each.ended_at ?? each.began_at])),
      }),
    table({
      id: "campaigns",
      rows: all,
      key: (each) => each.number,
      begin: { sort: "campaign", down: true },
      columns: [
        ["campaign", (each) => number(each.number), { kind: "n", sort: (each) => each.number }],
        ["began", (each) => clock(each.began_at), { kind: "s", sort: (each) => each.began_at }],
        ["took", (each) => (each.ended_at ? span(each.ended_at - each.began_at) : "–"), { kind: "n" }],
        ["why", (each) => each.why || "–", { kind: "why" }],
        ["rounds", (each) => number(each.rounds), { kind: "n", sort: (each) => each.rounds }],
        ["accuracy", (each) => percent(each.accuracy), { kind: "n", sort: (each) => each.accuracy }],
        ["experts", (each) => number(each.experts), { kind: "n", sort: (each) => each.experts }],
        [
          "what became of the experts",
          (each) =>
            each.lineage?.length
              ? h(
                  "ul",
                  { class: "plain" },
                  each.lineage.map((text) => h("li", {}, text)),
                )
              : "all were kept",
          { kind: "why" },
        ],
      ],
    }),
  );
}

export function introduction() {
  const i = data.fleet.introduction;
  if (!i) return null;
  const running = i.state === "running",
    paused = i.state === "paused";
  const buttons = [
    running && can("introduction-pause") && act("Pause", "introduction-pause"),
    paused && can("introduction-resume") && act("Resume", "introduction-resume"),
    (running || paused || i.state === "done") &&
      can("introduction-abort") &&
      act("Roll back", "introduction-abort", {}, true),
  ].filter(Boolean);
  return section(
    "Introduction",
    `How the bundles of campaign ${number(i.campaign)} come into service: first on a few devices, then on more.`,
    stages(i.stage, i.stages, i.state),
    facts([
      ["state", pill(i.state)],
      ["stage", `${number(Math.min(i.stage + (i.first_stage ?? 0), i.stages))} of ${number(i.stages)}`],
      ["in service", `on ${number(i.running)} of ${count(i.devices, "device")}`],
      ["kept its own", i.kept ? `${count(i.kept, "device")}, since the bundle there was better` : "no device"],
      i.reasons?.length > 0 && [
        "why",
        h(
          "ul",
          { class: "plain" },
          i.reasons.map((why) => h("li", {}, why)),
        ),
      ],
    ]),
    buttons.length > 0 && h("div", { class: "bar" }, buttons),
  );
}

const stages = (at, n, state) =>
  h(
    "ol",
    { class: "stages", "aria-hidden": "true" },
    Array.from({ length: Math.min(n, 12) }, (_, k) =>
      h("li", { class: state === "done" || k + 1 < at ? "past" : k + 1 === at ? `now ${state}` : null }, String(k + 1)),
    ),
  );

// -------------------------------------------------------------------------------------------------------- rollouts

let drafts = {}; // what was typed and chosen, by field

export function rollouts(detail) {
  if (detail.error) return section("Rollouts", null, h("p", { class: "error", role: "alert" }, detail.error));
  if (!detail.value) return section("Rollouts", "Loading…");
  const found = detail.value.rollouts;
  if (!found.length)
    return section("Rollouts", "No repository is shown here: name the folders of fedge release with --rollouts.");
  return found.map(rollout);
}

const NEXT = { pause: "Pause", resume: "Resume", abort: "Roll back", "go-on": "Supervise again" };

function rollout(r) {
  const { plan, progress } = r;
  const lines = Object.entries(r.devices ?? {}).sort((a, b) => byName(a[0], b[0]));
  const share = (x) => `${number(100 * x)} %`;
  const buttons =
    data.session.may_act &&
    r.actions
      .filter((name) => NEXT[name])
      .map((name) => act(NEXT[name], `rollout-${name}`, { rollout: r.rollout }, name === "abort"));
  const told = plan && [
    [
      "state",
      [
        pill(progress.state),
        r.supervised || progress.state === "done" || progress.state === "aborted" ? "" : " nobody supervises it now",
      ],
    ],
    ["release", `${plan.release} (${plan.target})`],
    [
      "stage",
      `${progress.stage + 1} of ${plan.stages.length}: ${lines.filter(([, d]) => d.takes_part).length} of ${lines.length} devices take part`,
    ],
    [
      "runs on",
      `${lines.filter(([, d]) => d.release === plan.release && (d.phase === "serving" || d.phase === "trial")).length} of ${lines.length} devices`,
    ],
    ["first", plan.canaries?.join(", ") || "the first share"],
    ["stages", plan.stages.map((x) => (x ? share(x) : "the first")).join(", ")],
    ["since", ago(progress.began)],
    [
      "why",
      progress.reasons?.length
        ? h(
            "ul",
            { class: "plain" },
            progress.reasons.map((why) => h("li", {}, why)),
          )
        : "–",
    ],
  ];
  const part = section(
    `Rollout of ${r.rollout}`,
    plan ? null : "No rollout was started from this repository yet.",
    plan && stages(progress.stage + 1, plan.stages.length, progress.state),
    plan && facts(told),
    buttons?.length > 0 && h("div", { class: "bar" }, buttons),
    data.session.may_act && r.actions.includes("start") && starter(r),
    plan && [
      h("h3", {}, "Devices"),
      table({
        id: `rollout:${r.rollout}`,
        rows: lines,
        key: ([id]) => id,
        columns: [
          ["device", ([id]) => link(id), { sort: ([id]) => id }],
          [
            "phase",
            ([, d]) => h("span", {}, pill(d.phase), ` release ${d.release}`),
            { kind: "s", sort: ([, d]) => d.phase },
          ],
          [
            "takes part",
            ([, d]) => (d.takes_part ? "yes" : "not yet"),
            { kind: "s", sort: ([, d]) => (d.takes_part ? 0 : 1) },
          ],
          ["why", ([, d]) => d.reason ?? "", { kind: "why" }],
          ["accuracy", ([id, d]) => compare(id, d, "accuracy", (x) => (100 * x).toFixed(1), " %"), { kind: "n" }],
          ["latency", ([id, d]) => compare(id, d, "latency_ms", (x) => number(x, 1), " ms", "load"), { kind: "n" }],
          ["free energy", ([id, d]) => compare(id, d, "free_energy", (x) => number(x, 2)), { kind: "n" }],
          [
            "°C",
            ([id, d]) => untold(data.byId.get(id), "load", d.temperature_c, number(d.temperature_c)),
            { kind: "n" },
          ],
          [
            "inputs",
            ([id, d]) =>
              d.drift ? driftPill(d.drift_kind) : withholds(data.byId.get(id), "use") ? secret() : "as ever",
            { kind: "s" },
          ],
          ["heard", ([, d]) => ago(d.seen_at), { kind: "n", sort: ([, d]) => d.seen_at }],
        ],
      }),
    ],
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
  const about = (value) => {
    const name = typeof value === "string" ? value : value.target;
    const ended = (r.earlier ?? []).find((e) => e.target === name && e.state === "aborted");
    return [name, ended ? `${name} (aborted)` : name];
  };
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
        kept("target", about(r.targets.at(-1))[0]),
        r.targets.map(about).map(([value, words]) => h("option", { value }, words)),
      ),
    ),
    h("label", {}, "shares ", h("input", { placeholder: "as configured", size: "12", ...kept("stages", "") })),
    h("label", {}, "first ", h("input", { placeholder: "devices", size: "12", ...kept("canary", "") })),
    h("button", { "data-key": `a:rollout-start:${r.rollout}` }, "Start a rollout"),
  );
}
