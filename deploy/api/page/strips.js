// One recorded group: each trajectory a film strip, the reward under each picture, the credit between two of them.

export async function drawStrips(holder, sample) {
  const sheet = new Image();
  sheet.src = `data:image/png;base64,${sample.png}`;
  await sheet.decode();
  const largest = Math.max(1e-9, ...sample.strips.flatMap((strip) => strip.gains.map((gain) => Math.abs(gain ?? 0))));
  holder.replaceChildren(...sample.strips.map((strip, row) => film(sample, strip, row, sheet, largest)));
}

function film(sample, strip, row, sheet, largest) {
  const list = document.createElement("ol");
  list.className = "strip";
  list.setAttribute("aria-label", `Trajectory ${strip.member}`);
  const points = sheet.naturalWidth / sample.width;
  for (let point = 0; point < points; point++) {
    const isFinal = point === points - 1;
    const name = isFinal ? "finished" : `before step ${sample.steps[point]}`;
    list.append(tile(sample, strip.rewards[point], row, point, sheet, name));
    if (points > 1 && !isFinal) list.append(credit(sample.steps[point], strip.gains[point], strip.advantages[point], largest));
  }
  return list;
}

function tile(sample, reward, row, point, sheet, name) {
  const item = document.createElement("li");
  item.className = "tile";
  const canvas = Object.assign(document.createElement("canvas"), { width: sample.width, height: sample.height });
  canvas.getContext("2d").drawImage(sheet, point * sample.width, row * sample.height, sample.width, sample.height, 0, 0, sample.width, sample.height);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `clean-picture estimate, ${name}`);
  item.append(canvas, text("b", reward == null ? "no score" : reward.toFixed(3)), text("span", name));
  return item;
}

function credit(step, gain, advantage, largest) {
  const item = document.createElement("li");
  item.className = "step";
  const value = text("b", gain == null ? "void" : `${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(3)}`);
  value.className = gain == null ? "" : gain > 0 ? "up" : gain < 0 ? "down" : "";
  value.style.setProperty("--w", `${(100 * Math.abs(gain ?? 0)) / largest}%`);
  const weight = advantage == null ? "none" : `${advantage >= 0 ? "+" : "−"}${Math.abs(advantage).toFixed(2)}`;
  item.append(text("span", `step ${step} →`), value, text("span", `advantage ${weight}`));
  return item;
}

function text(tag, content) {
  return Object.assign(document.createElement(tag), { textContent: content });
}
