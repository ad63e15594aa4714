"use strict";
// The charts of runs: phases of the steps, and how much each host's resources were used.
(() => {
  const { element, colour, shown, view, chart, valueAxis, nextNice, legend, lines, heatMap } = charts;
  const runs = JSON.parse(document.getElementById("data").textContent);

  // Steps: a bar a logged window, as high as its phases took, where it ran; pauses are hatched over the whole height.
  function stepsChart(holder, run, time) {
    if (!run.ranks.length) return;
    holder.append(element("h2", "", "Phases of the steps over time"));
    const names = [...run.phases, "(no phase)"], colours = [...run.colours.map((place) => `--c${place}`), "--none"], hidden = new Set();
    let chosen = run.ranks[0], drawn;
    if (run.ranks.length > 1) {
      const select = holder.appendChild(element("select"));
      select.setAttribute("aria-label", "rank");
      run.ranks.forEach((rank, place) => select.append(new Option(`rank ${rank.rank} on ${rank.host}`, place)));
      select.addEventListener("change", () => { chosen = run.ranks[select.value]; drawn.draw(); });
    }
    const stack = (place) => {
      const phases = run.phases.map((name) => (chosen.seconds[name] || [])[place] || 0);
      const rest = chosen.whole[place] - phases.reduce((sum, value) => sum + value, 0);
      return [...phases, rest > 0.005 * chosen.whole[place] ? rest : 0]; // numbers have four digits
    };
    const visible = () => names.map((name) => !hidden.has(name));
    const paint = (context, area, x) => {
      const keep = visible(), fills = colours.map(colour);
      let top = 0, marks = 0;
      const inside = [];
      chosen.to.forEach((to, place) => {
        if (to < time.from || chosen.from[place] > time.to) return;
        const values = stack(place);
        inside.push([place, values]);
        top = Math.max(top, values.reduce((sum, value, index) => sum + (keep[index] ? value : 0), 0));
      });
      top = nextNice(top);
      valueAxis(context, area, top, " s");
      for (const [place, values] of inside) {
        const from = Math.floor(x(chosen.from[place])), width = Math.max(1, Math.ceil(x(chosen.to[place])) - from);
        let y = area.top + area.height;
        values.forEach((value, index) => {
          if (!keep[index] || !value) return;
          const height = (value / top) * area.height;
          context.fillStyle = fills[index];
          context.fillRect(from, y - height, width, height);
          y -= height;
          marks += 1;
        });
      }
      context.fillStyle = colour("--text");
      for (const [began, seconds] of run.stalls) {
        if (began + seconds < time.from || began > time.to) continue;
        context.globalAlpha = 0.22;
        context.fillRect(x(began), area.top, Math.max(1, x(began + seconds) - x(began)), area.height);
        context.globalAlpha = 1;
      }
      return marks;
    };
    const hint = (at) => {
      const stall = run.stalls.find(([began, seconds]) => at >= began && at <= began + seconds);
      const place = chosen.to.findIndex((to) => to >= at);
      const lines = stall ? [`${stall[2]} after step ${stall[3]}: ${shown(stall[1])} s`] : [];
      if (place >= 0 && (!stall || chosen.from[place] <= at)) {
        lines.push(`epoch ${chosen.epoch[place]}, step ${chosen.step[place]}: ${chosen.whole[place]} s a step`);
        stack(place).forEach((value, index) => { if (value > 0) lines.push(`${names[index]} ${(value * 1000).toPrecision(3)} ms`); });
      }
      return lines.join("\n");
    };
    drawn = chart(holder, time, 250, "phases of the steps over time, stacked", paint, hint);
    legend(holder, names, colours, hidden, () => drawn.draw());
    if (run.stalls.length) holder.append(element("p", "note", "Grey bands: checkpoints and evaluations."));
  }

  runs.forEach((run, place) => {
    const holder = document.getElementById(`charts-${place}`), time = view(run.began, run.seconds);
    const notes = () => run.notes.forEach((note) => holder.append(element("p", "note", note)));
    if (!run.ranks.length && !run.hosts.length) return notes();
    const tools = holder.appendChild(element("div", "tools"));
    const all = tools.appendChild(element("button", "", "whole run")), visible = tools.appendChild(element("span", "dim"));
    all.addEventListener("click", time.all);
    time.changed = () => {
      const date = (at) => new Date((run.began + at) * 1000).toISOString().slice(0, 19).replace("T", " ");
      visible.textContent = `${date(time.from)} to ${date(time.to)} UTC. Drag over a chart to zoom in, double-click to zoom out; click a name to hide it.`;
    };
    time.changed();
    stepsChart(holder, run, time);
    if (run.hosts.length) holder.append(element("h2", "", "Hosts over time"));
    run.hosts.forEach((host, number) => {
      const part = holder.appendChild(element("details"));
      part.open = number < 2;
      part.append(element("summary", "", host.name));
      const quiet = ["throttled by the quota", "I/O wait"].filter((name) => {
        const series = host.percent.find((line) => line.name === name);
        return series && !series.mean.some((value) => value >= 1);
      });
      lines(part, time, host.bins, host.percent, { title: "Use", label: `Use of ${host.name}`, unit: " %", most: 100, hidden: quiet });
      heatMap(part, time, host.bins, host.rows, host.heat, {
        title: "Every core and GPU", label: `heat map of ${host.rows.length} cores and GPUs of ${host.name} over time`,
        large: host.rows.filter((name) => name.startsWith("gpu")).length,
      });
      lines(part, time, host.bins, host.bytes, {
        title: "Disks and network", label: `Disks and network of ${host.name}`, unit: " MB/s", most: 0, hidden: [],
      });
      part.addEventListener("toggle", () => time.charts.forEach((one) => part.contains(one.canvas) && one.draw()));
    });
    notes();
  });
  charts.ready();
})();
