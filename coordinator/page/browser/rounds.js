// The rounds, and the score over them.

import { bars, chart, spark } from "./chart.js";
import { data, findAccuracy, formatScore, score, scoreHeading, withholds } from "./data.js";
import { times } from "./device.js";
import { h } from "./dom.js";
import { accuracyCell, section } from "./fleet.js";
import { look, table } from "./table.js";
import { bytes, clock, hint, link, number, roundLink, secret, took } from "./words.js";

const PARTS = [
  ["answered", "var(--cluster-2)", "answered"],
  ["late", "var(--cluster-1)", "late"],
  ["failed", "var(--cluster-6)", "failed or declined"],
  ["open", "var(--open)", "open"],
];

export function rounds() {
  if (!data.rounds.length) return section("Rounds", "No round has begun.");
  return [
    section(
      "Rounds",
      "Orders of each round. Press a bar to see who was asked in it, and why.",
      bars({
        id: "rounds",
        label: "How many orders had which outcome in each round",
        rows: data.rounds,
        parts: PARTS,
        onPress: (r) => {
          location.hash = `round/${r}`;
        },
      }),
      h(
        "p",
        { class: "keys" },
        PARTS.map(([, color, words]) => h("span", { class: "key" }, h("i", { style: { background: color } }), words)),
      ),
      table({
        id: "rounds",
        rows: data.rounds,
        key: (r) => r.round,
        begin: { sort: "round", down: true },
        columns: [
          ["round", (r) => roundLink(r.round), { kind: "n", sort: (r) => r.round }],
          ["began", (r) => clock(r.begun_at), { kind: "s", sort: (r) => r.begun_at, badge: true }],
          [
            "took",
            (r) => (r.done_at ? took(r.done_at - r.begun_at) : "under way"),
            { kind: "n", sort: (r) => (r.done_at ? r.done_at - r.begun_at : null) },
          ],
          ["orders", (r) => number(r.asked), { kind: "n", sort: (r) => r.asked }],
          ["answered", (r) => number(r.answered), { kind: "n", sort: (r) => r.answered }],
          ["late", (r) => (r.late ? number(r.late) : "–"), { kind: "n", sort: (r) => r.late }],
          ["failed", (r) => (r.failed ? number(r.failed) : "–"), { kind: "n", sort: (r) => r.failed }],
          [score().words, (r) => formatScore(r.accuracy), { kind: "n", sort: (r) => r.accuracy }],
          ["from devices", (r) => bytes(r.bytes_up), { kind: "n", sort: (r) => r.bytes_up }],
          ["to devices", (r) => bytes(r.bytes_down), { kind: "n", sort: (r) => r.bytes_down }],
        ],
      }),
    ),
  ];
}

/** The devices whose lines the accuracy view needs: those on the page of its table. */
export const listDrawn = () =>
  (look("accuracy", { sort: score().words }).order ?? worst().map((d) => d.id)).slice(
    look("accuracy").page * 25,
    look("accuracy").page * 25 + 25,
  );

const worst = () =>
  data.devices.filter((d) => findAccuracy(d)[0] !== null).sort((a, b) => findAccuracy(a)[0] - findAccuracy(b)[0]);

export function accuracy(detail) {
  const told = data.devices.filter((d) => findAccuracy(d)[0] !== null);
  const silent = data.devices.filter((d) => findAccuracy(d)[0] === null);
  const [hidden, unmeasured] = [
    silent.filter((d) => withholds(d, "loss")),
    silent.filter((d) => !withholds(d, "loss")),
  ];
  const names = (devices) => [
    devices.slice(0, 12).map((d, k) => [k ? ", " : "", link(d.id)]),
    devices.length > 12 && ` and ${number(devices.length - 12)} more`,
  ];
  const of = detail.value?.of ?? {};
  const few = data.devices.length <= 25;
  const scores = Object.values(of).flatMap((points) => points.map(([, share]) => share)),
    low = Math.min(...scores, 1),
    high = score().share ? 1 : Math.max(...scores, low);
  return [
    section(
      scoreHeading(),
      few
        ? "Of the model that each device began a round with, on its own validation samples; bold: the mean of the cohort."
        : "Of the model that each device began a round with, on its own validation samples: the mean of the cohort, and where most devices are.",
      detail.error && h("p", { class: "error", role: "alert" }, detail.error),
      chart({
        id: "accuracy",
        label: `${scoreHeading()} by round`,
        times: times(),
        tall: 260,
        band: detail.value?.band ?? [],
        lines: [
          ...(few ? Object.entries(of).map(([name, points]) => ({ name, points, color: "var(--soft)" })) : []),
          {
            name: "mean of the cohort",
            points: data.history.filter((r) => r.accuracy != null).map((r) => [r.round, r.accuracy]),
            color: "var(--accent)",
            wide: true,
          },
        ],
      }),
      h(
        "p",
        { class: "keys" },
        [
          ["var(--accent)", "mean of the cohort"],
          ["var(--band)", "from a tenth to nine tenths of the devices"],
          ["var(--soft)", few ? "middle of them (dashed), and each device" : "middle of them"],
        ]
          .filter(Boolean)
          .map(([color, words]) => h("span", { class: "key" }, h("i", { style: { background: color } }), words)),
      ),
    ),
    section(
      "Devices, the worst first",
      `${scoreHeading()} of the bundle that answers, as far as it is known.`,
      table({
        id: "accuracy",
        rows: told,
        key: (d) => d.id,
        begin: { sort: score().words },
        empty: "Nothing has been measured yet.",
        columns: [
          ["device", (d) => link(d.id), { sort: (d) => d.id }],
          [score().words, accuracyCell, { kind: "n self", sort: (d) => findAccuracy(d)[0], badge: true }],
          ["in training", (d) => formatScore(d.accuracy), { kind: "n", sort: (d) => d.accuracy }],
          ["in round", (d) => number(d.accuracy_round), { kind: "n", sort: (d) => d.accuracy_round }],
          ["over the rounds", (d) => (of[d.id] ? spark(of[d.id], low, high) : ""), { kind: "drawn" }],
        ],
      }),
      hidden.length > 0 && hint(secret(), ": ", names(hidden)),
      unmeasured.length > 0 && hint("Nothing measured yet: ", names(unmeasured)),
    ),
  ];
}
