// Charts: lines with a band, and bars, with axes, a range of time, and figures under the pointer or the arrow keys.

import { score } from "./data.js";
import { h } from "./dom.js";
import { hint, number } from "./words.js";

const RANGES = [
  ["all", "all"],
  ["2592000", "30 d"],
  ["604800", "7 d"],
  ["86400", "24 h"],
  ["21600", "6 h"],
  ["3600", "1 h"],
];
const LEFT = 52,
  RIGHT = 14,
  TOP = 10,
  LOW = 26,
  LINES = 7;
const kept = {};
let render = () => {};
export const onChange = (work) => {
  render = work;
};
const look = (id) => (kept[id] ??= { range: "all", at: null });

function width(isHalf = false) {
  // of the inside of a section, and of one of two beside each other
  const all = document.getElementById("main").clientWidth,
    gap = all <= 640 ? 12 : 16;
  const section = isHalf && innerWidth >= 1000 ? (all - 3 * gap) / 2 : all - 2 * gap;
  return Math.max(Math.floor(section - 2 * gap - 2), 220);
}

/** Buttons for the range, as far as times are known. */
function ranges(id, set) {
  return h(
    "div",
    { class: "bar ranges", role: "group", "aria-label": "Range" },
    RANGES.map(([value, words]) =>
      h(
        "button",
        {
          type: "button",
          "data-key": `range:${id}:${value}`,
          "aria-pressed": String(set.range === value),
          onclick: () => {
            set.range = value;
            set.at = null;
            render();
          },
        },
        words,
      ),
    ),
  );
}

const since = (set) => (set.range === "all" ? null : Date.now() / 1000 - Number(set.range));

/** The round step of an axis that has at most about so many between two figures. */
function findStep(low, high, most, steps) {
  const rough = (high - low) / Math.max(most, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return steps
    ? (steps.find((each) => each >= rough) ?? steps.at(-1))
    : [1, 2, 2.5, 5, 10].map((m) => m * power).find((each) => each >= rough);
}

function ticks(low, high, most, steps) {
  const step = findStep(low, high, most, steps);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step || 0);
  return found;
}

const TIMES = [60, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800];
function timeTicks(low, high, most) {
  const zone = new Date(low * 1000).getTimezoneOffset() * 60;
  return ticks(low - zone, high - zone, most, TIMES).map((at) => at + zone);
}
const timeWords = (at, range) =>
  new Date(at * 1000).toLocaleString(
    "en-GB",
    range > 2 * 86400 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" },
  );

/**
 * Lines over the rounds.
 * @param lines [{name, color, wide, points: [[round, share]]}]; the wide ones are named under the pointer
 * @param band [[round, low, middle, high]]
 * @param times round -> when it ended
 * @param isHalf whether it is one of two beside each other
 */
export function chart({
  id,
  label,
  lines,
  band = [],
  times,
  unit = "round",
  isHalf = false,
  hasRanges = true,
  tall = 240,
  empty = "Nothing has been measured yet.",
}) {
  const set = look(id);
  const from = since(set);
  const place = (r) => (from === null ? r : times.get(r));
  const shows = (point) => from === null || (times.get(point[0]) ?? 0) >= from;
  const drawn = lines.map((line) => ({ ...line, points: line.points.filter(shows) }));
  const area = band.filter(shows);
  const rounds = [
    ...new Set([
      ...drawn.filter((line) => line.wide || !band.length).flatMap((line) => line.points.map(([r]) => r)),
      ...area.map(([r]) => r),
    ]),
  ].sort((a, b) => a - b);
  const bar = hasRanges && times.size > 0 && ranges(id, set);
  if (!rounds.length)
    return h("div", { key: `chart:${id}` }, bar, hint(from === null ? empty : "Nothing was measured in this time."));
  const w = width(isHalf),
    [a, b] = from === null ? [rounds[0], rounds.at(-1)] : [from, Date.now() / 1000];
  const values = [
    ...drawn.flatMap((line) => line.points.map(([, v]) => v)),
    ...area.flatMap(([, lo, , hi]) => [lo, hi]),
  ];
  const isShare = score().share,
    top = isShare ? 1 : Math.max(...values) + 0.01,
    lowest = isShare ? Math.max(Math.min(...values) - 0.01, 0) : Math.min(...values) - 0.01,
    pace = findStep(lowest, top, LINES);
  const least = isShare ? Math.max(Math.floor(lowest / pace) * pace, 0) : Math.floor(lowest / pace) * pace;
  const x = (r) => LEFT + (w - LEFT - RIGHT) * (b > a ? (place(r) - a) / (b - a) : 0.5);
  const y = (v) => tall - LOW - ((tall - LOW - TOP) * (v - least)) / (top - least || 1);
  const path = (points) => `M${points.map(([r, v]) => `${x(r).toFixed(1)},${y(v).toFixed(1)}`).join("L")}`;
  const most = Math.max(Math.floor(w / 90), 2);
  const xTicks =
    from === null
      ? ticks(a, b, most)
          .filter(Number.isInteger)
          .map((r) => [x(r), String(r)])
      : timeTicks(a, b, most).map((at) => [LEFT + ((w - LEFT - RIGHT) * (at - a)) / (b - a), timeWords(at, b - a)]);
  const middle = area.map(([r, , m]) => [r, m]);
  const told = (r) =>
    [
      ...drawn
        .filter((line) => line.wide)
        .map((line) => [line.name, line.color, line.points.find(([each]) => each === r)?.[1]]),
      ...area
        .filter(([each]) => each === r)
        .flatMap(([, lo, m, hi]) => [
          ["middle of the devices", "var(--soft)", m],
          ["from a tenth to nine tenths", "var(--band)", [lo, hi]],
        ]),
    ].filter(([, , v]) => v !== undefined && v !== null);
  return h(
    "div",
    { key: `chart:${id}`, class: "chart" },
    bar,
    plot(
      {
        id,
        set,
        label,
        w,
        tall,
        places: rounds,
        x,
        words: (r) => [
          `${unit} ${number(r)}${times.get(r) ? `, ${new Date(times.get(r) * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })}` : ""}`,
          told(r).map(([name, color, v]) =>
            h(
              "div",
              { class: "key" },
              h("i", { style: { background: color } }),
              `${name} ${Array.isArray(v) ? v.map(shareWords).join(" … ") : shareWords(v)}`,
            ),
          ),
        ],
      },
      axes(
        w,
        tall,
        ticks(least, top, LINES).map((v) => [y(v), shareWords(v)]),
        xTicks,
        from === null && unit === "round" ? unit : "",
      ),
      area.length > 1 &&
        h("path", {
          class: "band",
          d: `${path(area.map(([r, lo]) => [r, lo]))}L${path(area.map(([r, , , hi]) => [r, hi]).reverse()).slice(1)}Z`,
        }),
      middle.length > 1 && h("path", { class: "middle", d: path(middle) }),
      drawn
        .filter((line) => line.points.length)
        .map((line) =>
          line.points.length === 1
            ? h("circle", {
                key: `l:${line.name}`,
                cx: x(line.points[0][0]),
                cy: y(line.points[0][1]),
                r: line.wide ? 3 : 1.5,
                style: { fill: line.color },
              })
            : h("path", {
                key: `l:${line.name}`,
                class: line.wide ? "line wide" : "line",
                d: path(line.points),
                style: { stroke: line.color },
              }),
        ),
    ),
  );
}

const shareWords = (v) => (score().share ? `${number(100 * v, 1)}\u00a0%` : number(v, 3));

function axes(w, tall, yTicks, xTicks, under) {
  return h(
    "g",
    { class: "axes" },
    yTicks.map(([at, words]) => [
      h("line", { x1: LEFT, x2: w - RIGHT, y1: at, y2: at }),
      h("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, words),
    ]),
    xTicks.map(([at, words]) => [
      h("line", { class: "tick", x1: at, x2: at, y1: tall - LOW, y2: tall - LOW + 4 }),
      h("text", { x: at, y: tall - 8, "text-anchor": at > w - 30 ? "end" : "middle" }, words),
    ]),
    under && h("text", { x: 0, y: tall - 8 }, under),
  );
}

/** The drawing, with the figures of the place that is pointed at. */
function plot({ id, set, label, w, tall, places, x, words, onPress }, ...parts) {
  const nearest = (at) =>
    places.reduce((best, each) => (Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best), places[0]);
  const point = (at) => {
    if (set.at !== at) {
      set.at = at;
      requestAnimationFrame(render);
    }
  };
  const step = (by) =>
    point(
      places[Math.min(Math.max((set.at === null ? places.length : places.indexOf(set.at)) + by, 0), places.length - 1)],
    );
  const at = places.includes(set.at) ? set.at : null;
  const [title, lines] = at === null ? ["", []] : words(at);
  const left = at === null ? 0 : Math.min(Math.max(x(at) + 12, 0), w);
  return h(
    "div",
    { class: "plot" },
    h(
      "svg",
      {
        viewBox: `0 0 ${w} ${tall}`,
        width: String(w),
        height: String(tall),
        role: "img",
        "aria-label": label,
        tabindex: "0",
        "data-chart": id,
        class: onPress ? "pressed" : null,
        onpointermove: (e) => {
          const box = e.currentTarget.getBoundingClientRect();
          point(nearest(((e.clientX - box.left) * w) / box.width));
        },
        onpointerdown: (e) => {
          const box = e.currentTarget.getBoundingClientRect();
          point(nearest(((e.clientX - box.left) * w) / box.width));
        },
        onpointerleave: () => point(null),
        onblur: () => point(null),
        onclick: () => set.at !== null && onPress?.(set.at),
        onkeydown: (e) => {
          if (e.key === "ArrowLeft" || e.key === "ArrowRight") {
            e.preventDefault();
            step(e.key === "ArrowLeft" ? -1 : 1);
          }
          if (e.key === "Enter" && set.at !== null) onPress?.(set.at);
        },
      },
      at !== null && h("line", { key: "cross", class: "cross", x1: x(at), x2: x(at), y1: TOP, y2: tall - LOW }),
      parts,
    ),
    h(
      "div",
      {
        class: `tip${at === null ? " off" : ""}${left > w * 0.6 ? " left" : ""}`,
        role: "status",
        style: left > w * 0.6 ? { left: "auto", right: `${w - x(at) + 12}px` } : { left: `${left}px`, right: "auto" },
      },
      at !== null && [h("strong", {}, title), lines],
    ),
  );
}

/** Bars of parts, one for each round, or for some neighbours together if there are many. */
export function bars({ id, label, rows, parts, onPress, tall = 170 }) {
  const set = look(id);
  const from = since(set);
  const there = rows.filter((r) => from === null || r.begun_at >= from);
  if (!there.length) return h("div", { key: `chart:${id}` }, ranges(id, set), hint("No round was in this time."));
  const w = width();
  const many = Math.ceil(there.length / Math.floor((w - LEFT - RIGHT) / 5));
  const groups = [];
  for (let k = 0; k < there.length; k += many) groups.push(there.slice(k, k + many));
  const sums = groups.map((group) => parts.map(([name]) => group.reduce((n, r) => n + (r[name] ?? 0), 0)));
  const highest = Math.max(...sums.map((each) => each.reduce((n, x) => n + x, 0)), 1);
  const unit = Math.max(Math.ceil(findStep(0, highest, 5)), 1),
    top = unit * Math.ceil(highest / unit);
  const pace = Math.min((w - LEFT - RIGHT) / groups.length, 48);
  const y = (n) => tall - LOW - ((tall - LOW - TOP) * n) / top;
  const x = (k) => LEFT + pace * (k + 0.5);
  const name = (k) =>
    groups[k].length > 1
      ? `rounds ${groups[k][0].round} to ${groups[k].at(-1).round}`
      : `round ${groups[k][0].round}, ${new Date(groups[k][0].begun_at * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })}`;
  const stacks = parts.map(([part, color], p) =>
    h("path", {
      key: part,
      style: { fill: color },
      d: sums
        .map((each, k) => {
          if (!each[p]) return "";
          const under = each.slice(0, p).reduce((n, x) => n + x, 0),
            wide = Math.max(pace - 2, 1);
          return `M${(x(k) - wide / 2).toFixed(1)},${y(under).toFixed(1)}h${wide.toFixed(1)}V${y(under + each[p]).toFixed(1)}h${(-wide).toFixed(1)}Z`;
        })
        .join(""),
    }),
  );
  const every = Math.ceil(groups.length / Math.max(Math.floor((pace * groups.length) / 60), 1));
  const xTicks = groups.map((group, k) => [x(k), String(group[0].round), k]).filter(([, , k]) => k % every === 0);
  return h(
    "div",
    { key: `chart:${id}`, class: "chart" },
    ranges(id, set),
    plot(
      {
        id,
        set,
        label,
        w,
        tall,
        places: groups.map((_, k) => k),
        x,
        words: (k) => [
          name(k),
          parts.map(
            ([, color, told], p) =>
              sums[k][p] > 0 &&
              h("div", { class: "key" }, h("i", { style: { background: color } }), `${number(sums[k][p])} ${told}`),
          ),
        ],
        onPress: (k) => onPress(groups[k].at(-1).round),
      },
      axes(
        w,
        tall,
        Array.from({ length: top / unit + 1 }, (_, k) => [y(k * unit), number(k * unit)]),
        xTicks,
        "round",
      ),
      stacks,
    ),
  );
}

/** A line as small as a word. `low` and `high`: the scores at its edges. */
export function spark(points, low = 0, high = 1) {
  if (points.length < 2) return "–";
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const at = ([r, a]) =>
    `${(2 + (116 * (r - first)) / Math.max(last - first, 1)).toFixed(1)},${(28 - (26 * (a - low)) / (high - low || 1)).toFixed(1)}`;
  return h(
    "svg",
    {
      class: "spark",
      viewBox: "0 0 120 30",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `from ${shareWords(points[0][1])} to ${shareWords(points.at(-1)[1])}`,
    },
    h("path", { d: `M${points.map(at).join("L")}`, "vector-effect": "non-scaling-stroke" }),
  );
}
