// A trajectory record: a row for each trajectory, the reward under each image, the credit of a step between two images.

export async function drawTrajectories(holder, record) {
  const sheet = new Image();
  sheet.src = `data:image/png;base64,${record.png}`;
  await sheet.decode();
  const largest = Math.max(1e-9, ...record.trajectories.flatMap((trajectory) => trajectory.gains.map((gain) => Math.abs(gain ?? 0))));
  holder.replaceChildren(...record.trajectories.map((trajectory, row) => drawn(record, trajectory, row, sheet, largest)));
}

function drawn(record, trajectory, row, sheet, largest) {
  const list = document.createElement("ol");
  list.className = "trajectory";
  list.setAttribute("aria-label", `Trajectory ${trajectory.member}`);
  const points = sheet.naturalWidth / record.width;
  for (let point = 0; point < points; point++) {
    const isFinal = point === points - 1;
    const name = isFinal ? "finished" : `before step ${record.steps[point]}`;
    list.append(tile(record, trajectory.rewards[point], row, point, sheet, name));
    if (points > 1 && !isFinal) list.append(credit(record.steps[point], trajectory.gains[point], trajectory.advantages[point], largest));
  }
  return list;
}

function tile(record, reward, row, point, sheet, name) {
  const item = document.createElement("li");
  item.className = "tile";
  const canvas = Object.assign(document.createElement("canvas"), { width: record.width, height: record.height });
  canvas.getContext("2d").drawImage(sheet, point * record.width, row * record.height, record.width, record.height, 0, 0, record.width, record.height);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `clean-image estimate, ${name}`);
  item.append(canvas, text("b", reward == null ? "no score" : reward.toFixed(3)), text("span", name));
  return item;
}

function credit(step, gain, advantage, largest) {
  const item = document.createElement("li");
  item.className = "step";
  const value = text("b", gain == null ? "no gain" : `${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(3)}`);
  value.className = gain == null ? "" : gain > 0 ? "up" : gain < 0 ? "down" : "";
  value.style.setProperty("--w", `${(100 * Math.abs(gain ?? 0)) / largest}%`);
  const weight = advantage == null ? "none" : `${advantage >= 0 ? "+" : "−"}${Math.abs(advantage).toFixed(2)}`;
  item.append(text("span", `step ${step} →`), value, text("span", `advantage ${weight}`));
  return item;
}

function text(tag, content) {
  return Object.assign(document.createElement(tag), { textContent: content });
}
