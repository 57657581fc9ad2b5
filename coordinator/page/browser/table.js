// Tables: sorted, grouped, in pages, and as cards on a phone. How each is looked at stays while its rows change.

import { h } from "./dom.js";
import { hint, isSecret, number } from "./words.js";

const SIZE = 25;
const kept = {};
let render = () => {};
export const onChange = (work) => {
  render = work;
};

/** How somebody looks at a table: what is searched for, its order, its page, and groups that are folded. */
export const look = (id, begin = {}) =>
  (kept[id] ??= {
    words: "",
    only: "all",
    group: "",
    sort: null,
    down: false,
    page: 0,
    folded: new Set(),
    order: null,
    isNew: true,
    ...begin,
  });

export function change(id, values) {
  Object.assign(look(id), { page: 0, isNew: true, ...values });
  render();
}

/**
 * A table of rows.
 * @param columns [name, what a cell shows, {kind, sort: what it sorts by, about, head, badge: whether it stands on a card's first line, left or right}]
 * @param group what group a row is in, or nothing for no groups
 */
export function table({ id, columns: all, rows, key, empty = "Nothing yet.", size = SIZE, group = null, begin = {} }) {
  const set = look(id, begin);
  if (!rows.length) return hint(empty);
  const columns = all.filter(([, of, more]) => more?.kind !== "why" || rows.some((row) => !isEmpty(of(row))));
  const items = cut(arrange(id, set, columns, rows, key, group), set, group);
  const last = Math.max(Math.ceil(items.length / size) - 1, 0);
  set.page = Math.min(set.page, last);
  const shown = items.slice(set.page * size, (set.page + 1) * size);
  if (group && shown[0] && !shown[0].heading)
    shown.unshift({
      ...items
        .slice(0, set.page * size)
        .reverse()
        .find((item) => item.heading),
      again: true,
    });
  return h(
    "div",
    { key: `table:${id}`, "data-table": id },
    sorter(id, set, columns),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "cards" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            columns.map((column) => heading(id, set, column)),
          ),
        ),
        h(
          "tbody",
          {},
          shown.map((item) => (item.heading ? groupRow(id, set, item, columns.length) : row(item, columns, key))),
        ),
      ),
    ),
    last > 0 && pager(id, set, last, rows.length, items, size),
  );
}

const isEmpty = (told) => told === "" || told === "–" || told === null || told === undefined || told === false;

function arrange(id, set, columns, rows, key, group) {
  const column = columns.find(([name]) => name === set.sort);
  const held =
    set.order && !set.isNew && document.querySelector(`[data-table="${id}"] tbody:is(:hover, :focus-within)`);
  set.isNew = false;
  const by = column?.[2]?.sort;
  let found = rows.slice();
  if (held) {
    // nothing moves away under somebody's pointer
    const place = new Map(set.order.map((each, k) => [each, k]));
    found.sort((a, b) => (place.get(key(a)) ?? Infinity) - (place.get(key(b)) ?? Infinity) || 0);
  } else {
    if (by) found.sort((a, b) => compare(by(a), by(b), set.down));
    if (group) found.sort((a, b) => compare(group(a), group(b), false));
  }
  set.order = found.map(key);
  return found;
}

function compare(a, b, down) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1; // what is not known comes last, whichever way
  if (b === null || b === undefined) return -1;
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return down ? -order : order;
}

function cut(rows, set, group) {
  if (!group) return rows.map((row) => ({ row }));
  const groups = new Map();
  for (const row of rows) {
    const name = group(row);
    groups.has(name) ? groups.get(name).push(row) : groups.set(name, [row]);
  }
  return [...groups].flatMap(([name, members]) => [
    { heading: name, n: members.length },
    ...(set.folded.has(name) ? [] : members.map((row) => ({ row }))),
  ]);
}

function heading(id, set, [name, , { kind, sort, about } = {}]) {
  const current = set.sort === name;
  return h(
    "th",
    {
      scope: "col",
      class: kind?.startsWith("n") ? "n" : null,
      title: about,
      "aria-sort": current ? (set.down ? "descending" : "ascending") : null,
    },
    sort
      ? h(
          "button",
          {
            type: "button",
            class: "sort",
            "data-key": `sort:${id}:${name}`,
            onclick: () => change(id, { sort: name, down: current ? !set.down : Boolean(kind?.startsWith("n")) }),
          },
          name,
          current && h("span", { class: "arrow", "aria-hidden": "true" }, set.down ? "▼" : "▲"),
        )
      : name,
  );
}

function sorter(id, set, columns) {
  // cards have no headings
  const sorted = columns.filter(([, , more]) => more?.sort);
  if (!sorted.length) return null;
  return h(
    "div",
    { class: "bar sorter" },
    h(
      "label",
      {},
      "sorted by ",
      h(
        "select",
        {
          "data-key": `by:${id}`,
          value: set.sort ?? "",
          onchange: (e) =>
            change(id, {
              sort: e.target.value,
              down: columns.find(([name]) => name === e.target.value)?.[2]?.kind?.startsWith("n") ?? false,
            }),
        },
        !set.sort && h("option", { value: "" }, "as listed"),
        sorted.map(([name]) => h("option", { value: name }, name)),
      ),
    ),
    h(
      "button",
      {
        type: "button",
        "aria-label": set.down ? "Show the lowest first" : "Show the highest first",
        onclick: () => change(id, { down: !set.down }),
      },
      set.down ? "▼" : "▲",
    ),
  );
}

function groupRow(id, set, { heading, n, again }, width) {
  const folded = set.folded.has(heading);
  const turn = () => {
    folded ? set.folded.delete(heading) : set.folded.add(heading);
    render();
  };
  return h(
    "tr",
    { key: `group:${heading}`, class: "group" },
    h(
      "th",
      { colspan: String(width), scope: "colgroup" },
      h(
        "button",
        { type: "button", class: "sort", "aria-expanded": String(!folded), onclick: turn },
        h("span", { class: "arrow", "aria-hidden": "true" }, folded ? "▶" : "▼"),
        ` ${heading} `,
        h("span", { class: "soft" }, `${number(n)}${again ? ", continued" : ""}`),
      ),
    ),
  );
}

function row({ row }, columns, key) {
  const secrets = []; // a card names together what its owner does not tell
  const cells = columns.map(([name, of, { kind, head, badge } = {}], k) => {
    const told = of(row);
    if (isSecret(told)) secrets.push(name);
    return h(
      "td",
      {
        class: [kind, (head ?? k === 0) && "head", badge && "badge-cell"].filter(Boolean).join(" ") || null,
        "data-label": name,
        "data-empty": isEmpty(told),
        "data-secret": isSecret(told),
      },
      isEmpty(told) && told !== "–" ? null : told,
    );
  });
  const rest = secrets.length > 0 && h("td", { class: "rest" }, `not told by its owner: ${secrets.join(", ")}`);
  return h("tr", { key: key(row) }, cells, rest);
}

function pager(id, set, last, n, items, size) {
  const turn = (page) => {
    set.page = page;
    set.isNew = true;
    render();
    document.querySelector(`[data-table="${id}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const button = (words, label, page, off) =>
    h(
      "button",
      {
        type: "button",
        "data-key": `page:${id}:${label}`,
        "aria-label": label,
        disabled: off,
        onclick: () => turn(page),
      },
      words,
    );
  const from = set.page * size + 1,
    to = Math.min((set.page + 1) * size, items.length);
  return h(
    "div",
    { class: "bar pager" },
    button("«", "First page", 0, set.page === 0),
    button("‹", "Page before", set.page - 1, set.page === 0),
    h("span", { class: "soft" }, `${number(from)}–${number(to)} of ${number(items.length === n ? n : items.length)}`),
    button("›", "Next page", set.page + 1, set.page === last),
    button("»", "Last page", last, set.page === last),
  );
}
