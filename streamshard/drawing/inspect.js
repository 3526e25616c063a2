// The page of `inspect`: is it whole, how large is what, who holds which part of which parameter.
const params = rowsOf(report.parameters);
const files = rowsOf(report.file_list);
const LEFT = 86;
const MOST_BARS = 8;
const panels = [];
let first = 0;
for (const panel of report.panels ?? []) {
  const ways = panel.ways.map((way) => ({
    ...way, ranks: values(way.ranks), borders: values(way.borders), chunks: values(way.chunks),
    origin: values(way.origin), piece: values(way.piece), at: values(way.at),
  }));
  const places = panel.places && panel.places.map((place) => ({
    ...place, slot: values(place.slot), file: values(place.file), offset: values(place.offset),
    origin: place.origin ? values(place.origin) : ways[0].origin,
    piece: place.piece ? values(place.piece) : ways[0].piece,
    lead: place.lead ? values(place.lead) : ways[0].at,
  }));
  panels.push({ ...panel, first, colours: values(panel.colours), colour: values(panel.colour), ways, places, number: panels.length });
  first += panel.count;
}
// The same name is in several parts of a model, and in the hands of several expert ranks.
const several = new Set(params.map((param) => param.name)).size < params.length;
const partOf = (panel) => clean(panel.title.slice(0, panel.title.lastIndexOf(": ")));
const panelOf = (i) => panels.find((panel) => i >= panel.first && i < panel.first + panel.count);

/** Return the part of a parameter in a row: [place in the row, first element, elements]. */
function held(way, numel, i, row) {
  const begin = row * way.piece[i] - way.origin[i];
  const start = Math.max(begin, 0);
  return [way.at[i] + start - begin, start, Math.min(begin + way.piece[i], numel) - start];
}

/** Return where a parameter lies: parts of rows that are alike, as [first row, row after the last]. */
function bands(way, numel, i) {
  if (!numel) return [];
  const origin = way.origin[i], piece = way.piece[i], end = origin + numel;
  const head = Math.floor(origin / piece), full = Math.ceil(origin / piece), last = Math.floor((end - 1) / piece);
  const whole = Math.max(Math.floor(end / piece), full);
  const found = [];
  if (head < full) found.push([head, head + 1]);
  if (whole > full) found.push([full, whole]);
  if (last >= whole) found.push([last, last + 1]);
  return found;
}

const rankName = (way, row) => way.ranks.length ? `rank ${number(way.ranks[row])}` : `from ${number(row * way.length)}`;

function rowsText(way, [row, stop]) {
  if (!way.ranks.length) return "in this row";
  return stop === row + 1 ? rankName(way, row) : `ranks ${number(way.ranks[row])} to ${number(way.ranks[stop - 1])}`;
}

// The map of one way to cut a param group --------------------------------------------------------

function mapOf(panel, way, scaleLength) {
  const isApart = way.rows <= 32;
  const step = isApart ? (way.rows <= 8 ? 29 : way.rows <= 16 ? 23 : 18) : 420 / way.rows;
  const gap = isApart ? 3 : 0;
  const height = way.rows * step;
  const scaleOf = (width) => (width - LEFT - 46) / scaleLength;

  function draw(pen, width) {
    const scale = scaleOf(width), mute = theme("mute"), background = theme("bg");
    const colours = Array.from({ length: 6 }, (_, n) => theme(`c${n}`));
    const letters = [theme("l0"), theme("l")];
    const snap = (at) => Math.round(at * devicePixelRatio) / devicePixelRatio; // no gap shows between neighbours
    const y = (row) => snap(row * step);
    const bottom = (stop) => y(stop) - gap;
    pen.clearRect(0, 0, width, height + 40);
    pen.textAlign = "right"; pen.fillStyle = theme("fg"); pen.textBaseline = "middle";
    const every = isApart ? 1 : niceStep(way.rows, 8);
    for (let row = 0; row < way.rows; row += every) pen.fillText(rankName(way, row), LEFT - 10, Math.max(6, y(row) + (isApart ? (step - gap) / 2 : 0)));
    pen.fillStyle = hatch(pen);
    const hatched = way.ranks.length ? (isApart ? way.rows : 1) : 0;
    for (let row = 0; row < hatched; row++) pen.fillRect(LEFT, y(row), way.length * scale, bottom(isApart ? row + 1 : way.rows) - y(row));
    const wide = [];
    for (let k = 0; k < panel.count; k++) {
      const numel = params[panel.first + k].numel;
      const isDim = chosen !== null && chosen !== panel.first + k;
      const colour = panel.colour[k] % 6;
      for (const [row, stop] of bands(way, numel, k)) {
        for (let at = row; at < stop; at += isApart ? 1 : stop - row) {
          const [x, start, length] = held(way, numel, k, at);
          const left = snap(LEFT + x * scale), size = snap(LEFT + (x + length) * scale) - left;
          const top = y(at), base = bottom(isApart ? at + 1 : stop);
          if (base <= top || !size) continue;
          pen.globalAlpha = 1; pen.fillStyle = background; pen.fillRect(left, top, size, base - top);
          pen.globalAlpha = isDim ? 0.22 : 1; pen.fillStyle = colours[colour];
          pen.fillRect(left, top, size > 4 && base - top > 5 ? size - 1 : size, base - top);
          if (size > 40 && base - top >= 13) wide.push({ k, colour, left, size, middle: (top + base) / 2, start, length, isDim });
        }
      }
    }
    label(pen, wide, letters);
    pen.globalAlpha = 1;
    if (chosen !== null && panelOf(chosen) === panel) outline(pen, chosen - panel.first, scale, y, bottom);
    borders(pen, scale, y, bottom);
    axis(pen, scale, mute);
  }

  function label(pen, wide, letters) {
    pen.textAlign = "center"; pen.textBaseline = "middle";
    for (const strip of wide) {
      const name = clean(params[panel.first + strip.k].name), tail = name.split(".");
      const range = `${number(strip.start)} to ${number(strip.start + strip.length)}`;
      const texts = [`${name}  ${range}`, name, ...tail.slice(1, -1).map((_, k) => "…" + tail.slice(k + 1).join("."))];
      const text = texts.find((one) => one.length * 6.6 < strip.size - 6);
      pen.globalAlpha = strip.isDim ? 0.4 : 1;
      pen.fillStyle = letters[strip.colour === 0 ? 0 : 1];
      if (strip.isDim) pen.fillStyle = theme("fg");
      if (text) pen.fillText(text, strip.left + strip.size / 2, strip.middle);
    }
  }

  function outline(pen, k, scale, y, bottom) {
    const numel = params[panel.first + k].numel;
    pen.strokeStyle = theme("fg"); pen.lineWidth = 2; pen.fillStyle = theme("fg");
    for (const [row, stop] of bands(way, numel, k)) {
      for (let at = row; at < stop; at += isApart ? 1 : stop - row) {
        const [x, , length] = held(way, numel, k, at), until = isApart ? at + 1 : stop;
        const top = y(at), size = Math.max(2, length * scale), tall = Math.max(2, bottom(until) - top);
        if (size < 5 || tall < 5) pen.fillRect(LEFT + x * scale, top, size, tall);
        else pen.strokeRect(LEFT + x * scale + 1, top + 1, Math.max(1, size - 2), Math.max(1, tall - 2));
      }
    }
    pen.lineWidth = 1;
  }

  function borders(pen, scale, y, bottom) {
    pen.fillStyle = theme("fg");
    for (const at of way.borders) pen.fillRect(LEFT + at * scale - 0.6, 0, 1.2, bottom(way.rows));
    way.chunks.forEach((chunk, k) => {
      if (chunk * scale < 3) return;
      const end = way.origin[k] + params[panel.first + k].numel;
      for (let at = way.origin[k] + chunk; at < end; at += chunk) {
        const row = Math.floor(at / way.length), x = at % way.length;
        if (x) pen.fillRect(LEFT + x * scale - 0.6, bottom(row + 1) - 4, 1.2, 4);
      }
    });
  }

  function axis(pen, scale, mute) {
    const by = niceStep(way.length, way.length * scale > 400 ? 5 : 3);
    pen.strokeStyle = mute; pen.fillStyle = mute; pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    pen.beginPath(); pen.moveTo(LEFT, height + 3.5); pen.lineTo(LEFT + way.length * scale, height + 3.5);
    for (let at = 0; at <= way.length; at += by) {
      const x = LEFT + at * scale;
      pen.moveTo(x, height + 3.5); pen.lineTo(x, height + 8);
      pen.fillText(number(at), x, height + 20);
      if (at) pen.fillText(bytes(at * panel.itemsize), x, height + 34);
    }
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText("elements", LEFT - 14, height + 20); pen.fillText("size", LEFT - 14, height + 34);
  }

  /** Find what is at a point: [parameter in the group or -1 for padding, row]. */
  function find(x, y, width) {
    const row = Math.floor(y / step), element = (x - LEFT) / scaleOf(width);
    if (row < 0 || row >= way.rows || element < 0 || element >= way.length) return null;
    for (let k = 0; k < panel.count; k++) {
      const [at, , length] = held(way, params[panel.first + k].numel, k, row);
      if (length > 0 && element >= at && element < at + length) return [k, row];
    }
    return [-1, row];
  }

  function tell(x, y, width) {
    const found = find(x, y, width);
    if (!found) return undefined;
    const [k, row] = found;
    if (k < 0) return way.ranks.length ? ["Padding", `${rankName(way, row)}: belongs to no parameter`] : undefined;
    const param = params[panel.first + k], [, start, length] = held(way, param.numel, k, row);
    return [param.name, `elements ${number(start)} to ${number(start + length)} of ${number(param.numel)}`,
      `${rowsText(way, [row, row + 1])}: ${counted(length, "element")}, ${bytes(length * panel.itemsize)} of fp32`];
  }

  const choose = (...point) => {
    const found = find(...point);
    select(found && found[0] >= 0 ? panel.first + found[0] : null);
  };
  const text = `${way.title}: which rank holds which elements of ${counted(panel.count, "parameter")}`;
  const canvas = drawing(text, height + 40, draw, { tell, choose, key: move });
  const many = isApart ? "" : `${counted(way.rows, "rank")}, from top to bottom`;
  return [make("h3", {}, way.title), many && make("div", { class: "mute" }, many), canvas];
}

function hatch(pen) {
  const tile = make("canvas", { width: 6, height: 6 }), ink = tile.getContext("2d");
  ink.fillStyle = theme("pad"); ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = theme("hatch"); ink.lineWidth = 1.6;
  ink.beginPath();
  for (const at of [-6, 0, 6]) { ink.moveTo(at - 1, 7); ink.lineTo(at + 7, -1); }
  ink.stroke();
  return pen.createPattern(tile, "repeat");
}

// Following a parameter --------------------------------------------------------------------------

let chosen = null;
let shownPanel = 0;
let matches = params.map((_, i) => i);
const MOST = 200;
const search = make("input", {
  type: "search", placeholder: "Find a parameter", "aria-label": "Find a parameter", autocomplete: "off", spellcheck: "false",
  role: "combobox", "aria-expanded": "true", "aria-controls": "list", oninput: filter, onkeydown: move,
});
const list = make("ul", { class: "list", id: "list", role: "listbox", "aria-label": "Parameters" });
const count = make("div", { class: "mute", "aria-live": "polite" });
const detail = make("div", { id: "detail", "aria-live": "polite" });
const maps = make("div", { id: "maps" });
const tabs = panels.length > 6
  ? make("select", { "aria-label": "Param group", onchange: () => leaf(tabs.selectedIndex) })
  : make("div", { class: "tabs", role: "group", "aria-label": "Param groups" });

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  matches = [];
  params.forEach((param, i) => {
    const name = param.name.toLowerCase();
    if (words.every((word) => name.includes(word))) matches.push(i);
  });
  listMatches();
}

function listMatches() {
  const place = chosen === null ? 0 : Math.max(0, matches.indexOf(chosen));
  const from = Math.max(0, Math.min(place - MOST / 2, matches.length - MOST));
  const shown = matches.slice(from, from + MOST);
  list.replaceChildren(...shown.map((i) => {
    const panel = panelOf(i);
    return make("li", { role: "option", id: `p${i}`, "aria-selected": i === chosen ? "true" : "false", onclick: () => select(i) },
      make("i", { class: `c${panel.colour[i - panel.first] % 6}` }), named(params[i].name), several && make("span", { class: "mute" }, partOf(panel)));
  }));
  count.textContent = `${number(matches.length)} of ${counted(params.length, "parameter")}`
    + (shown.length < matches.length ? `; ${number(from + 1)} to ${number(from + shown.length)} listed` : "");
  const current = document.getElementById(`p${chosen}`);
  if (current) {
    search.setAttribute("aria-activedescendant", current.id);
    list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
  } else search.removeAttribute("aria-activedescendant");
}

function move(event) {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
  if (event.key === "Escape") { search.value = ""; filter(); select(null); }
  if (event.key === "Enter" && matches.length) select(matches.includes(chosen) ? chosen : matches[0]);
  if (!by || !matches.length) return;
  event.preventDefault();
  const at = matches.indexOf(chosen);
  select(matches[at < 0 ? 0 : Math.max(0, Math.min(matches.length - 1, at + by))]);
}

function select(i) {
  chosen = i;
  const panel = i === null ? null : panelOf(i);
  if (panel && panel.number !== shownPanel) showPanel(panel.number);
  else for (const canvas of maps.querySelectorAll("canvas")) canvas.draw();
  listMatches();
  showDetail();
  const hash = i === null ? "#" : `#${encodeURIComponent(params[i].name)}`;
  try { history.replaceState(null, "", hash); } catch { /* a viewer without addresses */ }
}

/** List where each state of a parameter lies: in which file, and where in it. */
function piecesOf(panel, k) {
  const numel = params[panel.first + k].numel, found = [];
  for (const place of panel.places ?? []) {
    const origin = place.origin[k], piece = place.piece[k];
    for (let n = Math.floor(origin / piece); numel && n <= Math.floor((origin + numel - 1) / piece); n++) {
      const begin = n * piece - origin, start = Math.max(begin, 0), where = place.slot[k] + n;
      found.push({
        state: place.state, file: files[place.file[where]], start, stop: Math.min(begin + piece, numel),
        offset: place.offset[where] + (place.lead[k] + start - begin) * place.itemsize, itemsize: place.itemsize,
      });
    }
  }
  return found;
}

function showDetail() {
  if (chosen === null) {
    detail.replaceChildren(make("p", { class: "mute" }, "Point at a part to see its name. Click it, or choose a parameter in the list, to see where its bytes lie."));
    return;
  }
  const param = params[chosen], panel = panelOf(chosen), k = chosen - panel.first;
  const pieces = piecesOf(panel, k), total = pieces.reduce((sum, one) => sum + (one.stop - one.start) * one.itemsize, 0);
  const where = panel.ways.map((way) => {
    const found = bands(way, param.numel, k);
    if (!way.ranks.length) return [way.title, report.kind === "store" ? counted(param.pieces, "chunk") : "whole"];
    const rows = [found[0]?.[0], found.at(-1)?.[1]];
    return [way.title, found.length ? rowsText(way, rows) : "nowhere: it has no elements"];
  });
  const most = 600;
  const rows = pieces.slice(0, most).map((one) => [
    one.state, one.file && one.file.rank !== null ? String(one.file.rank) : "-", named(one.file?.path ?? "?"),
    `${number(one.start)} to ${number(one.stop)}`, number(one.offset), bytes((one.stop - one.start) * one.itemsize),
  ]);
  const byCommand = () => command("inspect", report.path, "--param", param.name);
  detail.replaceChildren(...[
    make("h3", {}, named(param.name)),
    several && make("div", { class: "mute" }, partOf(panel)),
    facts([
      ["shape", param.shape.length ? param.shape.map(number).join(" × ") : "a single number"], ["elements", number(param.numel)],
      total ? ["in these files", bytes(total)] : ["fp32", bytes(param.numel * panel.itemsize)], ...where,
    ]),
    rows.length ? table(["state", ">rank", "file", ">elements", ">at byte", ">size"], rows) : make("p", { class: "mute" }, "Where the bytes lie: ", byCommand()),
    pieces.length > most && make("p", { class: "mute" }, `${number(pieces.length - most)} more: `, byCommand()),
  ].filter(Boolean));
}

/** Turn to another param group. */
function leaf(number) {
  chosen = null;
  showPanel(number);
  listMatches();
  showDetail();
}

function showPanel(number) {
  shownPanel = number;
  const panel = panels[number];
  const lengths = panel.ways.map((way) => way.length);
  const isShared = Math.max(...lengths) <= 3 * Math.min(...lengths);
  maps.replaceChildren(...panel.ways.flatMap((way) => mapOf(panel, way, isShared ? Math.max(...lengths) : way.length)).filter(Boolean));
  const keys = panel.colours.length <= 12 ? panel.colours.map((name, n) => make("span", {}, make("i", { class: `c${n % 6}` }), named(name))) : [];
  const hatched = make("span", {}, make("i", { class: "hatch" }), "padding, which belongs to no parameter");
  const many = panel.note ? make("span", {}, panel.note) : panel.colours.length > 6 ? make("span", {}, "colours repeat") : null;
  maps.append(make("div", { class: "key" }, ...keys, panel.ways.some((way) => way.ranks.length) && hatched, report.border && make("span", {}, `line: ${report.border}`), many,
    isShared || panel.ways.length < 2 ? null : make("span", {}, "the two are drawn to different scales")));
  if (panels.length > 6) tabs.selectedIndex = number;
  else [...tabs.children].forEach((tab, n) => tab.setAttribute("aria-pressed", n === number ? "true" : "false"));
  for (const canvas of maps.querySelectorAll("canvas")) canvas.draw();
}

// How large is what ------------------------------------------------------------------------------

function sizesByRank() {
  const ranks = new Map();
  for (const file of files) {
    if (file.rank === null || file.rank === undefined) continue;
    const one = ranks.get(file.rank) ?? { nbytes: 0, files: 0 };
    ranks.set(file.rank, { nbytes: one.nbytes + file.nbytes, files: one.files + 1 });
  }
  if (!ranks.size) return null;
  // Each rank of a model in one part has a file; of a model in several, files do not tell how many ranks share a part.
  const expected = report.data_parallel ?? (report.model_parts === 1 ? report.world_size : 0);
  const last = Math.max(...ranks.keys(), expected - 1), HEIGHT = 150, BASE = 122;
  const all = Array.from({ length: last + 1 }, (_, rank) => ranks.get(rank) ?? { nbytes: 0, files: 0 });
  const largest = Math.max(...all.map((one) => one.nbytes)), smallest = Math.min(...all.map((one) => one.nbytes));
  // Ranks have equally many files, but experts' ranks may not.
  const most = report.is_whole === false ? Math.max(...all.map((one) => one.files)) : 1;
  const lacks = (one) => one.files < most;
  const rankAt = (x, width) => Math.floor(((x - LEFT + 16) / (width - LEFT + 12)) * all.length);
  const tell = (x, y, width) => {
    const rank = rankAt(x, width), one = all[rank];
    return one && [`rank ${number(rank)}`, `${counted(one.files, "file")}, ${bytes(one.nbytes)}`, ...(lacks(one) ? ["fewer files than other ranks"] : [])];
  };
  const draw = (pen, width) => {
    const step = (width - LEFT + 12) / all.length, left = LEFT - 16;
    pen.clearRect(0, 0, width, HEIGHT);
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillStyle = theme("mute");
    for (const part of [0, 0.5, 1]) pen.fillText(bytes(largest * part), left - 8, BASE - part * 112);
    const bar = (rank, tall, colour, alpha) => {
      pen.fillStyle = colour; pen.globalAlpha = alpha;
      pen.fillRect(left + rank * step, BASE - tall, step > 4 ? step - 1 : Math.max(step, 0.7), tall);
    };
    const [own, bad] = [theme("c0"), theme("bad")];
    all.forEach((one, rank) => {
      if (lacks(one)) bar(rank, 112, bad, 0.35);
      if (one.files) bar(rank, Math.max(1, (one.nbytes / largest) * 112), lacks(one) ? bad : own, 1);
    });
    pen.globalAlpha = 1; pen.fillStyle = theme("mute"); pen.textAlign = "center"; pen.textBaseline = "alphabetic";
    for (let rank = 0, by = niceStep(all.length, 8); rank < all.length; rank += by) pen.fillText(number(rank), left + (rank + 0.5) * step, BASE + 16);
  };
  const missing = all.filter(lacks).length;
  const said = missing ? `${counted(missing, "rank")} with files missing (red)` : bytes(smallest) === bytes(largest) ? `${bytes(largest)} each`
    : `${bytes(smallest)} to ${bytes(largest)}`;
  const rest = files.filter((file) => file.rank === null || file.rank === undefined);
  const other = rest.length ? `; ${counted(rest.length, "file")} of no single rank: ${bytes(rest.reduce((sum, file) => sum + file.nbytes, 0))}` : "";
  return make("div", { class: "card" }, make("h3", {}, report.model_parts > 1 ? "Files of each data-parallel rank" : "Files of each rank"), make("div", { class: "mute" }, said + other),
    drawing(`Bytes of the files of each of ${counted(all.length, "rank")}: ${said}`, HEIGHT, draw, { tell }));
}

function sizes() {
  const states = Object.entries(report.state_bytes ?? {}).map(([name, nbytes]) => ({ name, nbytes }));
  const groups = (report.groups ?? []).map((group, n) => ({
    name: `${group.model_part ? `${group.model_part}, ` : ""}group ${n}${group.expert_rank === null ? "" : `, expert rank ${group.expert_rank}`}`,
    nbytes: group.numel, text: counted(group.parameters, "parameter"),
  }));
  const kinds = (report.file_groups ?? []).map((group) => ({
    name: group.pattern, nbytes: group.nbytes, text: `${counted(group.files, "file")}, ${bytes(group.nbytes)}`,
  })).sort((one, other) => other.nbytes - one.nbytes);
  const card = (title, rows) => rows.length > 0 && make("div", { class: "card" }, make("h3", {}, title), bars(rows.slice(0, MOST_BARS)),
    rows.length > MOST_BARS ? make("p", { class: "mute" }, `${number(rows.length - MOST_BARS)} more`) : null);
  const cards = [
    sizesByRank(), card("Tensors by state, without padding", states), card("Param groups", groups), card("Files by kind", kinds),
  ].filter(Boolean);
  return cards.length ? [make("h2", {}, "Sizes"), make("div", { class: "cards" }, ...cards)] : [];
}

// The page ---------------------------------------------------------------------------------------

function judged() {
  const problems = [...(report.problems ?? []), ...(report.alarms ?? [])];
  const check = make("p", { class: "mute" }, "Only headers and sizes were read. This reads and checks every byte: ", command("verify", report.path));
  if (report.is_whole === false) return verdict("bad", "Not whole: no job can resume from it", problems);
  if (report.kind === "directory") {
    const known = report.checkpoints, whole = known.filter((one) => one.is_whole);
    const said = `${counted(known.length, "checkpoint")}, ${whole.length === known.length ? "all whole" : `${number(whole.length)} of them whole`}`;
    return verdict(whole.length < known.length ? "bad" : problems.length ? "warn" : "good", said, problems);
  }
  if (problems.length) return verdict("warn", `Readable, but look at ${problems.length === 1 ? "this" : `these ${problems.length}`} first`, problems, check);
  if (report.weights_only) return verdict("warn", "Weights only: its optimizer states were dropped, so no job can resume from it", [], check);
  const isOfRanks = ["native", "dumps"].includes(report.kind);
  const what = isOfRanks ? `the files of all ${number(report.world_size)} ranks are there and agree` : "all files are there and agree";
  return verdict("good", `Whole: ${what}`, [], check);
}

/** List the checkpoints of the directory, the newest first. */
function checkpoints() {
  const known = report.checkpoints ?? [];
  const says = (one) => one.is_whole === null ? "not known" : !one.is_whole ? "not whole" : one.is_healthy === false ? "not healthy"
    : one.warnings.length ? "suspicious" : one.is_healthy ? "whole, healthy" : "whole";
  const tone = { whole: "good", "whole, healthy": "good", "not whole": "bad", "not healthy": "bad", suspicious: "warn", "not known": "warn" };
  const rows = known.toReversed().map((one) => [
    named(one.path), make("b", { class: tone[says(one)] }, says(one)), one.step === null ? "" : number(one.step), one.world_size === null ? "" : number(one.world_size),
    bytes(one.nbytes), (one.changed ?? "").slice(0, 16).replace("T", " "), make("span", {}, clean([...(one.problem ? [one.problem] : []), ...one.warnings].join(" "))),
  ]);
  const head = ["checkpoint", "", ">step", ">ranks", ">size", "saved (UTC)", "problem"];
  return known.length > (report.kind === "directory" ? 0 : 1) ? [make("h2", {}, "Checkpoints here"), table(head, rows)] : [];
}

function about() {
  const numel = (report.groups ?? []).reduce((sum, group) => sum + group.numel, 0);
  const degrees = [["tensor", report.tensor_parallel], ["pipeline", report.pipeline_parallel], ["expert", report.expert_parallel]];
  const shared = degrees.filter(([, count]) => count > 1).map(([kind, count]) => `${count} ${kind}-parallel`);
  return facts([
    ["kind", report.kind_title + (report.codec ? `, ${report.codec}` : "")],
    ["saved by", typeof report.zero_stage !== "number" || typeof report.world_size !== "number" ? null : `${counted(report.world_size, "rank")}, ZeRO stage ${report.zero_stage}`],
    ["parallel degrees", shared.length ? `${report.data_parallel} data-parallel, ${shared.join(", ")}` : null],
    ["step", typeof report.global_steps === "number" ? number(report.global_steps) : null],
    ["trained parameters", params.length ? `${number(params.length)}, ${number(numel)} elements` : null],
    ["dtype of the model", report.module_dtype], ["optimizer", report.optimizer], ["DeepSpeed", report.deepspeed_version],
    ["on disk", report.files === undefined ? null : `${counted(report.files, "file")}, ${bytes(report.file_bytes)}`],
  ]);
}

show(() => {
  const notes = (report.notes ?? []).filter((note) => !report.alarms?.includes(note));
  panels.forEach((panel) => tabs.append(panels.length > 6 ? make("option", {}, clean(panel.title))
    : make("button", { type: "button", onclick: () => leaf(panel.number) }, clean(panel.title))));
  const keys = make("p", { class: "mute" }, make("kbd", {}, "/"), " finds a parameter, ", make("kbd", {}, "↑"), " ", make("kbd", {}, "↓"), " go through them, ", make("kbd", {}, "Esc"), " shows all again.");
  return [
    make("h1", {}, clean(report.path.split("/").filter(Boolean).at(-1) ?? report.path), make("span", { class: "mute" }, report.tag ? ` at ${clean(report.tag)}` : "")),
    make("div", { class: "mute name" }, clean(report.path)),
    judged(), about(),
    notes.length ? make("details", { open: notes.length < 3 ? "" : undefined }, make("summary", {}, `Notes (${notes.length})`), make("ul", {}, ...notes.map((note) => make("li", {}, clean(note))))) : null,
    ...checkpoints(), ...sizes(),
    ...(panels.length ? [
      make("h2", {}, "Who holds what"), make("p", { class: "mute" }, `${!panels[0].ways[0].ranks.length ? "Rows follow one another" : "A row is a rank"}, and a colour is a parameter or some whose names begin alike.`), panels.length > 1 ? tabs : null,
      make("div", { class: "split" }, make("div", {}, search, list, count, keys), make("div", {}, maps, detail)),
    ] : []),
  ];
});
if (panels.length) {
  const began = performance.now();
  const wanted = decodeURIComponent(location.hash.slice(1));
  showPanel(0);
  const asked = wanted ? params.findIndex((param) => param.name === wanted) : -1;
  if (asked >= 0) select(asked);
  else { listMatches(); showDetail(); }
  document.documentElement.dataset.milliseconds = Math.round(Number(document.documentElement.dataset.milliseconds) + performance.now() - began);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); search.select(); }
  });
}
