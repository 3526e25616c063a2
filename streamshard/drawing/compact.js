// The page of `compact --status`: what became of each checkpoint of a run, and what that saves.
const STATES = {
  unhealthy: { colour: "c7", says: "look at it", means: "it cannot be opened, or something about it failed" },
  kept: { colour: "c0", says: "kept", means: "in the run directory, not archived" },
  archiving: { colour: "c4", says: "archiving", means: "its archive is being made, or was interrupted" },
  archived: { colour: "c2", says: "archived", means: "archived, and the original is where it was" },
  "in the trash": { colour: "c1", says: "in the trash", means: "archived; its space is free when the trash is emptied" },
  "being removed": { colour: "c1", says: "being removed", means: "on its way out of the trash" },
  removed: { colour: "c3", says: "archive only", means: "the original is gone, and the archive has all of it" },
  "weights only": { colour: "c5", says: "weights only", means: "the original and the archive's optimizer states are gone" },
};
const GONE = ["removed", "weights only"];
const day = (text) => (text ?? "").slice(0, 16).replace("T", " ");

/** Return a row for each checkpoint that is there, or was. */
function checkpointsOf(run) {
  const failed = new Map((run.last_run?.problems ?? []).map((tag) => [tag.tag, tag.reason]));
  const present = new Map(run.present.map((tag) => [tag.tag, tag]));
  const rows = run.tags.map((tag) => {
    const here = present.get(tag.tag), isBack = GONE.includes(tag.state) && here;
    present.delete(tag.tag);
    return {
      ...tag, state: isBack ? "kept" : tag.state === "unreadable" ? "unhealthy" : tag.state, changed: here?.changed,
      original: here?.nbytes ?? tag.source_bytes, problem: tag.problem || here?.problem || failed.get(tag.tag) || "",
    };
  });
  for (const tag of present.values()) {
    rows.push({ ...tag, state: "kept", original: tag.nbytes, archive_bytes: 0, problem: tag.problem || failed.get(tag.tag) || "" });
  }
  for (const row of rows) if (row.problem) row.state = "unhealthy";
  return rows.sort((one, other) => (one.step ?? -1) - (other.step ?? -1) || (one.tag < other.tag ? -1 : 1));
}

function big(pairs) {
  return make("div", { class: "big" }, ...pairs.filter(Boolean).map(([value, says]) => make("div", {}, make("b", {}, value), make("span", {}, says))));
}

/** Draw each checkpoint: its original to the left, outlined where it is gone, and its archive to the right. */
function timeline(run, rows) {
  const LEFT = 76, BASE = 190, TALL = 170, HEIGHT = 216;
  const largest = Math.max(1, ...rows.map((row) => Math.max(row.original, row.archive_bytes)));
  const stepOf = (width) => Math.min(90, (width - LEFT - 8) / rows.length);
  const draw = (pen, width) => {
    const step = stepOf(width), left = LEFT;
    pen.clearRect(0, 0, width, HEIGHT);
    pen.fillStyle = theme("mute"); pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      pen.fillText(bytes(largest * part), LEFT - 8, BASE - part * TALL);
      pen.fillStyle = theme("line"); pen.fillRect(LEFT, BASE - part * TALL, rows.length * step, 1); pen.fillStyle = theme("mute");
    }
    rows.forEach((row, i) => {
      const x = left + i * step + step * 0.12, size = step * 0.46, tall = Math.max(2, (row.original / largest) * TALL);
      const archive = (row.archive_bytes / largest) * TALL;
      const state = STATES[row.state] ?? STATES.unhealthy;
      if (GONE.includes(row.state)) {
        pen.strokeStyle = theme("hatch"); pen.setLineDash([4, 3]);
        pen.strokeRect(x + 0.5, BASE - tall + 0.5, Math.max(1, size - 1), tall - 1); pen.setLineDash([]);
      } else {
        pen.fillStyle = theme(state.colour === "c7" ? "bad" : state.colour);
        pen.fillRect(x, BASE - tall, size, tall);
      }
      if (row.archive_bytes) {
        pen.fillStyle = row.state === "weights only" ? theme("c5") : theme("c3");
        pen.fillRect(x + size + 1, BASE - archive, Math.max(1, step * 0.26), archive);
      }
      if (row.state === "unhealthy") {
        pen.fillStyle = theme("bad"); pen.textAlign = "center"; pen.fillText("!", x + size / 2, BASE - tall - 9);
      }
    });
    pen.fillStyle = theme("mute"); pen.textAlign = "center"; pen.textBaseline = "alphabetic";
    const every = Math.max(1, Math.ceil(60 / step));
    for (let i = 0; i < rows.length; i += every) pen.fillText(rows[i].step === null ? "-" : number(rows[i].step), left + (i + 0.5) * step, BASE + 18);
    pen.textAlign = "right"; pen.fillText("step", LEFT - 8, BASE + 18);
  };
  const tell = (x, y, width) => {
    const row = rows[Math.floor((x - LEFT) / stepOf(width))];
    if (!row || x < LEFT) return undefined;
    return [row.tag, (STATES[row.state] ?? STATES.unhealthy).says, `original ${bytes(row.original)}${GONE.includes(row.state) ? ", gone" : ""}`,
      ...(row.archive_bytes ? [`archive ${bytes(row.archive_bytes)}`] : []), ...(row.problem ? [row.problem] : [])];
  };
  return drawing(`Size of each of ${counted(rows.length, "checkpoint")} by step`, HEIGHT, draw, { tell });
}

function key(rows) {
  const used = Object.entries(STATES).filter(([state]) => rows.some((row) => row.state === state) && !GONE.includes(state));
  const items = used.map(([, state]) => make("span", {}, make("i", { class: state.colour }), `${state.says}: ${state.means}`));
  const gone = rows.some((row) => GONE.includes(row.state));
  return make("div", { class: "key" }, ...items, gone && make("span", {}, make("i", { class: "gone" }), "original that is gone"),
    rows.some((row) => row.archive_bytes) && make("span", {}, make("i", { class: "c3" }), "archive"),
    rows.some((row) => row.state === "weights only") && make("span", {}, make("i", { class: "c5" }), "archive of the weights only"));
}

function lastRun(run) {
  const last = run.last_run;
  if (!last) return "no record of any";
  const done = Object.entries(last.actions).map(([action, count]) => `${number(count)} ${action}`).join(", ");
  const end = last.ended ? `ended ${day(last.ended)} with exit code ${last.exit_code}` : "has not ended: it is running, or was killed";
  return `${last.began ? `began ${day(last.began)}, ` : ""}${end}${done ? ` (${done})` : ""}`;
}

function runOf(run, isOne) {
  const rows = checkpointsOf(run), bad = rows.filter((row) => row.state === "unhealthy");
  const count = (...states) => rows.filter((row) => states.includes(row.state)).length;
  const problems = [...(run.problem ? [run.problem] : []), ...(run.last_run?.error ? [`The last run: ${run.last_run.error}`] : []),
    ...bad.map((row) => row.problem.includes(row.tag) ? row.problem : `${row.tag}: ${row.problem}`)];
  const title = problems.length ? `${counted(problems.length, "thing")} to look at`
    : rows.length ? `All ${counted(rows.length, "checkpoint")} can be opened or ${count(...GONE) === 1 ? "is" : "are"} archived` : "No checkpoints yet";
  const cells = rows.toReversed().map((row) => {
    const state = STATES[row.state] ?? STATES.unhealthy, saved = GONE.includes(row.state) ? row.original - row.archive_bytes : 0;
    return [
      named(row.tag), row.step === null ? "" : number(row.step), make("b", { class: `tag ${state.colour}` }, state.says),
      GONE.includes(row.state) ? "gone" : bytes(row.original), row.archive_bytes ? bytes(row.archive_bytes) : "", saved ? bytes(saved) : "",
      day(row.changed), day(row.archived), day(row.trash_until),
    ];
  });
  const head = ["checkpoint", ">step", "state", ">original", ">archive", ">saved", "written (UTC)", "archived", "in the trash until"];
  return [
    isOne ? make("h1", {}, clean(run.run_dir.split("/").filter(Boolean).at(-1))) : make("h2", {}, clean(run.run_dir)),
    verdict(problems.length ? "bad" : "good", title, problems),
    big([
      [number(rows.length), "checkpoints, with those that are gone"], [number(count("kept")), "kept"], [number(count("archived", "archiving")), "archived, original still there"],
      [number(count("in the trash", "being removed")), run.trash_bytes ? `in the trash: ${bytes(run.trash_bytes)}` : "in the trash"],
      [number(count(...GONE)), "in the archive only"], [bytes(run.saved_bytes), "saved"], [bytes(run.archive_bytes), "size of the archives"],
    ]),
    rows.length > 0 && timeline(run, rows), rows.length > 0 && key(rows),
    facts([["run directory", named(run.run_dir)], ["archives", named(run.archive_dir)], ["the job resumes from", run.latest], ["last run of compact (UTC)", lastRun(run)]]),
    rows.length > 0 && table(head, cells),
  ];
}

show(() => {
  const isOne = report.runs.length === 1;
  const title = isOne ? [] : [make("h1", {}, `${number(report.runs.length)} runs`), big([
    [bytes(report.runs.reduce((sum, run) => sum + run.saved_bytes, 0)), "saved"],
    [bytes(report.runs.reduce((sum, run) => sum + run.trash_bytes, 0)), "in the trash"],
    [bytes(report.runs.reduce((sum, run) => sum + run.archive_bytes, 0)), "size of the archives"],
  ])];
  return [...title, ...report.runs.flatMap((run) => runOf(run, isOne))];
});
