// Campaigns, and the introduction of what they learned.

import { chart } from "./chart.js";
import { data, formatScore, score, scoreHeading } from "./data.js";
import { act, INTRODUCTION } from "./dialogs.js";
import { h } from "./dom.js";
import { section } from "./fleet.js";
import { devicesOf, facts, plainList, stages, steer } from "./rollouts.js";
import { table } from "./table.js";
import { ago, capital, clock, count, number, pill, span, age } from "./words.js";

const can = (name) => data.session.may_act && data.fleet.actions.includes(name);

export function campaigns(detail) {
  const c = data.fleet.campaign;
  if (!c) return section("Campaigns", "This coordinator has had no campaign yet.");
  const rests = c.state === "resting";
  const introduced = detail.value?.rollouts.find((r) => r.rollout === INTRODUCTION);
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
          c.state === "running" && can("finish") && act("Finish now", "finish", {}, "asks"),
        ),
      ),
      introduction(introduced),
    ),
    introduced?.plan && section("Devices of the introduction", null, devicesOf(introduced)),
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
        label: `${scoreHeading()} by campaign`,
        tall: 180,
        unit: "campaign",
        hasRanges: false,
        lines: [{ name: score().words, points, color: "var(--accent)", wide: true }],
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
        [score().words, (each) => formatScore(each.accuracy), { kind: "n", sort: (each) => each.accuracy }],
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

/** @param r the introduction among the rollouts, if it has been read */
function introduction(r) {
  const i = data.fleet.introduction;
  if (!i) return null;
  const buttons = r ? steer(r) : [];
  return section(
    "Introduction",
    `How the bundles of campaign ${number(i.campaign)} come into service: first on a few devices, then on more.`,
    stages(i.stage, i.stages, i.state),
    facts([
      ["state", pill(i.state)],
      ["stage", `${number(i.stage)} of ${number(i.stages)}`],
      ["in service", `on ${number(i.running)} of ${count(i.devices, "device")}`],
      ["kept its own", i.kept ? `${count(i.kept, "device")}, since the bundle there was better` : "no device"],
      i.reasons?.length > 0 && ["why", plainList(i.reasons)],
    ]),
    buttons.length > 0 && h("div", { class: "bar" }, buttons),
  );
}
