// A trajectory record: one row per trajectory; below each image its reward and calibrated value, between two images the
// step reward and the advantage. Images that nobody scored are estimates to look at. If a record has finished images only,
// the steps stand before them.

const signed = (value, digits) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(digits)}`;

export function explanation(record, credit) {
  const mean = record.group_mean == null ? "" : `The group's mean reward is ${record.group_mean.toFixed(3)}.`;
  const skipped = record.skipped.length ? "An image without a reward is the policy's estimate of the finished image at that step; it is not scored." : "";
  const step = credit ? "" : "A step reward is the credit of the step.";
  return [mean, step, skipped].filter(Boolean).join(" ");
}

export async function drawTrajectories(holder, record) {
  const sheet = new Image();
  sheet.src = `data:image/png;base64,${record.png}`;
  await sheet.decode();
  const largest = Math.max(1e-9, ...record.trajectories.flatMap((trajectory) => trajectory.step_rewards.map((earned) => Math.abs(earned ?? 0))));
  holder.replaceChildren(...record.trajectories.map((trajectory, row) => drawn(record, trajectory, row, sheet, largest)));
}

function drawn(record, trajectory, row, sheet, largest) {
  const list = document.createElement("ol");
  list.className = "trajectory";
  list.setAttribute("aria-label", `Trajectory ${trajectory.member}`);
  const points = sheet.naturalWidth / record.width;
  const creditOf = (index) => credit(record.steps[index], trajectory.step_rewards[index], trajectory.advantages[index], largest);
  if (points === 1) list.append(...record.steps.map((_, index) => creditOf(index)));
  for (let point = 0; point < points; point++) {
    const isFinal = point === points - 1;
    const name = isFinal ? "finished" : `before step ${record.steps[point]}`;
    list.append(tile(record, trajectory, row, point, sheet, name));
    if (!isFinal) list.append(creditOf(point));
  }
  return list;
}

function tile(record, trajectory, row, point, sheet, name) {
  const reward = trajectory.rewards[point];
  const value = trajectory.values?.[point];
  const item = document.createElement("li");
  item.className = name === "finished" ? "tile finished" : "tile";
  const canvas = Object.assign(document.createElement("canvas"), { width: record.width, height: record.height });
  canvas.getContext("2d").drawImage(sheet, point * record.width, row * record.height, record.width, record.height, 0, 0, record.width, record.height);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `clean-image estimate, ${name}`);
  const isSkipped = record.skipped.includes(record.steps[point]);
  item.append(canvas, text("b", isSkipped ? "not scored" : reward == null ? "no score" : `reward ${reward.toFixed(3)}`));
  if (trajectory.values && !isSkipped) item.append(text("span", value == null ? "no value" : `value ${signed(value, 3)}`));
  item.append(text("span", name));
  return item;
}

function credit(step, earned, advantage, largest) {
  const item = document.createElement("li");
  item.className = "step";
  const value = text("b", earned == null ? "none" : signed(earned, 3));
  value.className = earned == null ? "" : earned > 0 ? "up" : earned < 0 ? "down" : "";
  value.style.setProperty("--w", `${(100 * Math.abs(earned ?? 0)) / largest}%`);
  item.append(text("span", `step ${step} →`), text("span", "step reward"), value);
  item.append(text("span", `advantage ${advantage == null ? "none" : signed(advantage, 2)}`));
  return item;
}

function text(tag, content) {
  return Object.assign(document.createElement(tag), { textContent: content });
}
