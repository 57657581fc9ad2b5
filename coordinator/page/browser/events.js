// What has happened: events by kind, device and round, with what belongs together in one row.

import { ask, data, formatScore, score } from "./data.js";
import { h } from "./dom.js";
import { section } from "./fleet.js";
import { change, look, table } from "./table.js";
import { clock, count, eventName, hint, link, number, roundLink, stepKey } from "./words.js";

const KINDS = [
  ["all", "everything"],
  ["problems", "problems"],
  ["rounds", "rounds"],
  ["devices", "devices"],
  ["answers", "answers"],
];
const OF_A_ROUND = new Set(["round_begun", "chosen", "asked", "round_done"]);
const LAST = 200;
let known = { of: "", events: [], isWhole: false };

const query = () => {
  const set = look("events", { kind: "all", device: "", round: "" });
  return new URLSearchParams({ kind: set.kind, device: set.device, round: set.round }).toString();
};

/** Read what has happened since the last time. */
export async function readEvents() {
  const of = query();
  if (known.of !== of) known = { of, events: [], isWhole: false };
  const own = known;
  const after = own.events.at(-1)?.number ?? 0;
  const { events } = await ask(`api/events?${of}&last=${LAST}&after=${after}`);
  if (!after) own.isWhole = events.length < LAST;
  own.events = [...own.events, ...events].slice(-2000);
  return own;
}

async function readOlder() {
  const own = known;
  const { events } = await ask(`api/events?${own.of}&last=${LAST}&before=${own.events[0].number}`);
  own.isWhole = events.length < LAST;
  own.events = [...events, ...own.events];
  change("events", { page: look("events").page });
}

export const eventColumns = [
  ["when", (e) => clock(e.at), { kind: "s", badge: true, head: false }],
  ["round", (e) => (e.round ? roundLink(e.round) : ""), { kind: "n" }],
  ["event", (e) => eventName(e.name), { kind: "s", head: true }],
  [
    "device",
    (e) => (e.device ? link(e.device) : e.devices ? count(e.devices, "device") : ""),
    { kind: "s", head: false },
  ],
  ["what", (e) => e.text, { kind: "why", head: false }],
];
const columns = eventColumns.map(([name, of, more]) => [name, of, { ...more, head: name === "event" }]);

/** Put together what one row can tell: a round from its begin to its end, and the same words of several devices. */
function fold(events) {
  const rows = [];
  const open = new Map();
  for (const e of events) {
    const key = OF_A_ROUND.has(e.name) ? `round:${e.round}` : e.device ? `${e.name}:${e.round}:${e.text}` : null;
    const row = key && open.get(key);
    if (row) {
      row.parts.push(e);
      Object.assign(row, { at: e.at, number: row.number });
    } else {
      const made = { ...e, parts: [e], key };
      if (key) open.set(key, made);
      rows.push(made);
    }
  }
  return rows
    .sort((a, b) => a.at - b.at || a.number - b.number)
    .map((row) => (row.parts.length > 1 || row.key?.startsWith("round:") ? join(row) : row));
}

function join(row) {
  if (!row.key.startsWith("round:"))
    return { ...row, device: "", devices: new Set(row.parts.map((e) => e.device)).size };
  const of = (name) =>
    row.parts
      .filter((e) => e.name === name)
      .map((e) => e.text)
      .filter(Boolean);
  const counted = data.byRound.get(row.round);
  const told =
    counted &&
    [
      [counted.answered, "answered"],
      [counted.late, "late"],
      [counted.failed, "failed or declined"],
      [counted.open, "open"],
    ]
      .filter(([n]) => n)
      .map(([n, words]) => `${number(n)} ${words}`)
      .join(", ");
  const isDone = row.parts.some((e) => e.name === "round_done");
  const share = counted?.accuracy;
  return {
    ...row,
    name: isDone ? "round_done" : "round_begun",
    text: [...of("chosen"), ...of("asked"), told, isDone && share != null && `${score().words} ${formatScore(share)}`]
      .filter(Boolean)
      .join("; "),
  };
}

export function events(detail) {
  const set = look("events", { kind: "all", device: "", round: "" });
  const own = detail.value;
  const field = (name, words, more) =>
    h("input", {
      type: "search",
      size: "14",
      placeholder: words,
      "aria-label": words,
      "data-key": `events:${name}`,
      value: set[name],
      onchange: (e) => change("events", { [name]: e.target.value.trim() }),
      ...more,
    });
  const bar = h(
    "div",
    { class: "bar events", key: "bar" },
    h(
      "div",
      { class: "choice", role: "group", "aria-label": "Which events" },
      KINDS.map(([value, words]) =>
        h(
          "button",
          {
            type: "button",
            "data-key": `kind:${value}`,
            "aria-pressed": String(set.kind === value),
            onclick: () => change("events", { kind: value }),
          },
          words,
        ),
      ),
    ),
    field("device", "of a device"),
    field("round", "of a round", { inputmode: "numeric", pattern: "[0-9]*" }),
  );
  const rows = own ? fold(own.events).reverse() : [];
  return section(
    "Events",
    "The newest first. What belongs to a round, and what several devices say alike, is in one row.",
    bar,
    detail.error && h("p", { class: "error", role: "alert" }, detail.error),
    !own
      ? !detail.error && hint("Loading…")
      : table({
          id: "events",
          rows,
          key: (e) => e.number,
          columns,
          size: 40,
          empty: "Nothing like that has happened.",
        }),
    own &&
      !own.isWhole &&
      own.events.length > 0 &&
      h(
        "div",
        { class: "bar" },
        h("button", { type: "button", onclick: readOlder }, "Read older events"),
        h("span", { class: "soft" }, `since ${clock(own.events[0].at)}`),
      ),
    own &&
      stepKey(
        own.events.flatMap((e) => (["asked", "answer", "closed"].includes(e.name) ? [e.text.split(":")[0]] : [])),
      ),
  );
}
