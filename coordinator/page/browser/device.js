// One device, one round, and the experts with their devices.

import { chart } from "./chart.js";
import { data, drifts, driftKind, findAccuracy, formatScore, getWork, score, scoreHeading, withholds } from "./data.js";
import { act } from "./dialogs.js";
import { h } from "./dom.js";
import { eventColumns } from "./events.js";
import { section, stateCell, untold } from "./fleet.js";
import { change, table } from "./table.js";
import {
  ago,
  bytes,
  capital,
  count,
  driftPill,
  DRIFTS,
  gigabytes,
  hint,
  link,
  number,
  percent,
  pill,
  roundLink,
  secret,
  step,
  stepKey,
  took,
  withCode,
} from "./words.js";

export const color = (name) => {
  const k = data.fleet.clusters.findIndex((c) => c.name === name);
  return `var(--cluster-${Math.max(k, 0) % 8})`;
};
export const times = () =>
  new Map(data.rounds.filter((r) => r.done_at ?? r.begun_at).map((r) => [r.round, r.done_at ?? r.begun_at]));
const failed = (detail) => detail.error && h("p", { class: "error", role: "alert" }, detail.error);

const outcome = [
  ["outcome", (r) => pill(r.outcome), { sort: (r) => r.outcome, kind: "s", badge: true }],
  ["took", (r) => (r.seconds ? took(r.seconds) : "–"), { kind: "n", sort: (r) => r.seconds || null }],
  ["sent", (r) => bytes(r.bytes), { kind: "n", sort: (r) => r.bytes }],
  ["why asked", (r) => r.chosen, { kind: "why" }],
  ["why not done", (r) => r.why, { kind: "why" }],
];

const listMatters = (id) => (data.fleet.attention ?? []).filter((each) => each.device === id);

function facts(d) {
  const of = (name) => d[`context.${name}`];
  const [share, where] = findAccuracy(d);
  const work = getWork(d);
  const load = [
    ["load", of("load"), (x) => number(x, 2)],
    ["RAM free", of("free_ram_gb"), gigabytes],
    ["disk free", of("free_disk_gb"), gigabytes],
    ["temperature", of("temperature_c"), (x) => `${number(x)} °C`],
    ["battery", of("battery"), percent],
  ];
  return [
    ["state", [stateCell(d), ` heard ${ago(d.seen_at)}`]],
    (d.why || !listMatters(d.id).length) && ["trouble", d.why || "none is known"],
    [
      score().words,
      share === null ? (withholds(d, "loss") ? secret() : "not measured yet") : `${formatScore(share)} ${where}`,
    ],
    work.n > 0 && [
      "at work",
      `${number(work.right)} right, ${number(work.wrong)} wrong among answers that were labelled later`,
    ],
    work.covered !== null && [
      "coverage",
      `${percent(work.covered)} of the sets held the label that came later, ${percent(work.coverage)} wanted`,
    ],
    [
      "inputs",
      drifts(d)
        ? [driftPill(driftKind(d)), ` ${DRIFTS[driftKind(d)]?.[1] ?? "They have left what the bundle was fitted to."}`]
        : withholds(d, "use")
          ? secret()
          : d["health.phase"]
            ? "as ever"
            : "not watched: fedge serve does not run there",
    ],
    ["bundle", d.release ? `release ${d.release}` : "none"],
    ["samples that may be used", untold(d, "count", d.n_samples, number(d.n_samples))],
    ["trained", count(d.trained ?? 0, "time")],
    [
      "experts",
      d.clusters?.length
        ? d.clusters.map((name) =>
            h("span", { class: "key" }, h("i", { style: { background: color(name) } }), `expert ${name}`),
          )
        : "–",
    ],
    [
      "context",
      withholds(d, "load")
        ? secret()
        : load
            .filter(([, x]) => x != null)
            .map(([name, x, words]) => `${name} ${words(x)}`)
            .join(", ") || "–",
    ],
    ["not told by its owner", d.withholds?.join(", ") || "nothing"],
  ].filter(Boolean);
}

export function device(id, detail) {
  const d = data.byId.get(id);
  if (!d) return [back(), section(id, "No device of this name is known.")];
  const told = detail.value;
  const matters = listMatters(id);
  return [
    back(),
    failed(detail),
    h(
      "div",
      { class: "pair", key: "pair" },
      h(
        "section",
        { key: `s:${id}` },
        h("h2", {}, id),
        matters.map((each) =>
          h(
            "div",
            { class: `matter ${each.severity}` },
            h("p", { class: "what" }, capital(each.text)),
            each.do && h("p", { class: "do" }, withCode(capital(each.do))),
          ),
        ),
        h(
          "dl",
          {},
          facts(d).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
        ),
        data.session.may_act &&
          h(
            "p",
            { class: "bar" },
            d.retired
              ? act("Give it orders again", "readmit", { device: id })
              : act("Retire this device", "retire", { device: id }, "danger"),
          ),
      ),
      section(
        scoreHeading(),
        "Of the model that it began a round with, on its own validation samples.",
        withholds(d, "loss")
          ? h("p", {}, secret())
          : told
            ? chart({
                id: `device:${id}`,
                label: `${scoreHeading()} of ${id}`,
                times: times(),
                tall: 300,
                isHalf: true,
                lines: [{ name: id, points: told.accuracy, color: "var(--accent)", wide: true }],
              })
            : hint("Loading…"),
      ),
    ),
    section(
      "What it was asked",
      "And why not, where it was not.",
      told
        ? [
            table({
              id: "orders",
              rows: told.rounds,
              key: (r) => `${r.round}:${r.step}`,
              size: 15,
              columns: [
                ["round", (r) => roundLink(r.round), { kind: "n", sort: (r) => r.round }],
                ["step", (r) => step(r.step), { kind: "s" }],
                ...outcome,
              ],
            }),
            stepKey(told.rounds.map((r) => r.step)),
          ]
        : hint("Loading…"),
    ),
    section(
      "Events",
      null,
      told
        ? table({
            id: "own-events",
            rows: told.events.slice().reverse(),
            key: (e) => e.number,
            size: 15,
            columns: eventColumns.filter(([name]) => name !== "device"),
          })
        : hint("Loading…"),
    ),
  ];
}

const back = (to = "fleet", words = "All devices") =>
  h("p", { class: "back", key: "back" }, h("a", { href: `#${to}` }, `‹ ${words}`));

export function round(name, detail) {
  const told = detail.value;
  const title = `Round ${name}`;
  return [
    back("rounds", "All rounds"),
    failed(detail),
    section(
      title,
      told?.text,
      told
        ? [
            table({
              id: "round",
              rows: told.devices,
              key: (r) => `${r.device}:${r.step}`,
              begin: { sort: "device" },
              columns: [
                ["device", (r) => link(r.device), { sort: (r) => r.device }],
                ["step", (r) => step(r.step), { kind: "s", sort: (r) => r.step }],
                ...outcome,
              ],
            }),
            stepKey(told.devices.map((r) => r.step)),
          ]
        : !detail.error && hint("Loading…"),
    ),
  ];
}

// -------------------------------------------------------------------------------------------------------- clusters

const DRAWN = 60; // devices that a drawing has room for
const NAMED = 24; // devices that a list of a cluster names

export function clusters() {
  const found = data.fleet.clusters;
  const { experts } = data.fleet;
  const shared = experts ? `There are no clusters, but ${experts}.` : "There is one model for all so far.";
  if (!found.length) return section("Clusters and experts", shared);
  return section(
    "Clusters and experts",
    "One expert for each cluster. A device in several clusters learns from all of them, and stands between them.",
    h(
      "div",
      { class: "beside" },
      map(found),
      h(
        "div",
        {},
        found.map((c) =>
          h(
            "div",
            { key: c.name },
            h(
              "h3",
              {},
              h(
                "span",
                { class: "key" },
                h("i", { style: { background: color(c.name) } }),
                `expert ${c.name}, ${count(c.members.length, "device")}`,
              ),
            ),
            h(
              "ul",
              { class: "cluster" },
              c.members.slice(0, NAMED).map((id) => h("li", { key: id }, link(id))),
            ),
            c.members.length > NAMED &&
              h(
                "p",
                { class: "hint" },
                h(
                  "a",
                  { href: "#fleet", onclick: () => change("fleet", { group: "cluster", only: "all", words: "" }) },
                  `and ${number(c.members.length - NAMED)} more`,
                ),
              ),
          ),
        ),
      ),
    ),
  );
}

function map(found) {
  const [w, tall] = [720, found.length > 2 ? 440 : 240];
  const hubs = new Map(
    found.map((c, k) => {
      const angle = (2 * Math.PI * k) / found.length - Math.PI * (found.length === 2 ? 1 : 0.5);
      return [
        c.name,
        found.length === 1 ? [w / 2, tall / 2] : [w / 2 + 210 * Math.cos(angle), tall / 2 + 140 * Math.sin(angle)],
      ];
    }),
  );
  const most = Math.max(...found.map((c) => c.members.length));
  const size = (c) => 18 + 42 * Math.sqrt(c.members.length / most) * Math.min(most / 30, 1);
  const several = data.devices.filter((d) => d.clusters?.length > 1);
  const hubCircles = found.map((c) => {
    const [x, y] = hubs.get(c.name);
    return [
      h("circle", {
        class: "hub",
        cx: x,
        cy: y,
        r: size(c),
        style: { fill: `color-mix(in srgb, ${color(c.name)} 16%, var(--surface))`, stroke: color(c.name) },
      }),
      h(
        "text",
        { x, y: y + 4, "text-anchor": "middle" },
        data.devices.length > DRAWN ? `${c.name}: ${number(c.members.length)}` : c.name,
      ),
    ];
  });
  const drawing = (...parts) =>
    h(
      "svg",
      {
        viewBox: `0 0 ${w} ${tall}`,
        role: "img",
        "aria-label": "Devices around their experts; the lists beside say the same",
      },
      parts,
    );
  if (data.devices.length > DRAWN) {
    const shared = new Map();
    for (const d of several) {
      const key = d.clusters.slice().sort().join(" ");
      shared.set(key, (shared.get(key) ?? 0) + 1);
    }
    return drawing(
      [...shared].flatMap(([key, n]) => {
        const own = key
          .split(" ")
          .map((name) => hubs.get(name))
          .filter(Boolean);
        const [x, y] = middle(own);
        return [
          own.map((p) =>
            h("line", {
              class: "link",
              x1: x,
              y1: y,
              x2: p[0],
              y2: p[1],
              style: { strokeWidth: String(1 + Math.sqrt(n)) },
            }),
          ),
          h("circle", { class: "dot", cx: x, cy: y, r: 5 + Math.sqrt(n) }),
          h(
            "text",
            { x, y: y - 9 - Math.sqrt(n), "text-anchor": "middle" },
            `${number(n)} in both`.replace("both", own.length > 2 ? "all" : "both"),
          ),
        ];
      }),
      hubCircles,
    );
  }
  const places = data.devices
    .filter((d) => d.clusters?.some((name) => hubs.has(name)))
    .map((d, k) => {
      const own = d.clusters.map((name) => hubs.get(name)).filter(Boolean);
      const c = found.find((each) => each.name === d.clusters[0]);
      const isAlone = own.length === 1 && c.members.length <= 14; // on a ring, so that names do not meet
      const turn = isAlone
        ? (2 * Math.PI * (c.members.indexOf(d.id) + 0.5)) / c.members.length - Math.PI / 2
        : k * 2.39996;
      const far = isAlone ? size(c) + 22 : 24 + 40 * ((k * 0.618) % 1);
      const [x, y] = middle(own);
      return { d, turn, x: x + far * Math.cos(turn), y: y + far * Math.sin(turn) };
    });
  return drawing(
    places.flatMap(({ d, x, y }) =>
      d.clusters.map((name) => {
        const p = hubs.get(name);
        return p && h("line", { class: "link", x1: x, y1: y, x2: p[0], y2: p[1] });
      }),
    ),
    hubCircles,
    places.map(({ d, x, y }) =>
      h("circle", {
        class: "dot",
        cx: x,
        cy: y,
        r: 6,
        style: { fill: color(d.clusters[0]) },
        onclick: () => {
          location.hash = `device/${encodeURIComponent(d.id)}`;
        },
      }),
    ),
    places.length <= 40 &&
      places.map(({ d, turn, x, y }) =>
        h(
          "text",
          { x: x + (Math.cos(turn) < 0 ? -9 : 9), y: y + 4, "text-anchor": Math.cos(turn) < 0 ? "end" : "start" },
          d.id,
        ),
      ),
  );
}

const middle = (points) => [
  points.reduce((s, p) => s + p[0], 0) / points.length,
  points.reduce((s, p) => s + p[1], 0) / points.length,
];
