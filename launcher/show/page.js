"use strict";
// Charts of a page: values over one time axis, drawn on canvases. They zoom together, tell what is under the pointer, and follow the
// page's colours. A page's own script draws with these and ends with `charts.ready()`.
const charts = (() => {
  const LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 22, NONE = 255;
  const tip = document.body.appendChild(element("div", "tip"));
  const redraws = [];

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

  function elapsed(seconds) {
    const whole = Math.max(0, Math.round(seconds)), pad = (number) => String(number).padStart(2, "0");
    const days = Math.floor(whole / 86400), text = `${pad(Math.floor(whole / 3600) % 24)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
    return days ? `${days} d ${text}` : text;
  }
  function clock(unix, step) {
    const text = new Date(unix * 1000).toISOString();
    return step >= 86400 ? text.slice(5, 10) : step >= 60 ? text.slice(11, 16) : step >= 1 ? text.slice(11, 19) : text.slice(14, 21);
  }
  const TIME_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
  function niceStep(span, most) {
    const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw) || raw;
  }
  function shown(value) {
    return value === 0 ? "0" : Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toFixed(1) : value.toPrecision(2);
  }

  // The visible part of a time that begins at `began` (Unix seconds) and lasts `seconds`; every chart made with it follows it.
  function view(began, seconds) {
    const state = { began, seconds, from: 0, to: seconds, charts: [] };
    state.show = (from, to) => {
      const least = seconds / 5000;
      if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
      state.from = Math.max(0, from); state.to = Math.min(seconds, to);
      state.charts.forEach((chart) => chart.draw());
      state.changed();
    };
    state.all = () => state.show(0, seconds);
    state.changed = () => {};
    return state;
  }

  // A canvas with time to the right. `paint(context, area, x)` draws inside and returns how many marks; `hint(time, y, area)` is the text
  // under the pointer.
  function chart(holder, time, height, label, paint, hint) {
    const box = holder.appendChild(element("div", "chart")), canvas = box.appendChild(element("canvas"));
    const cross = box.appendChild(element("div", "cross")), range = box.appendChild(element("div", "range"));
    canvas.style.height = `${height}px`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    const self = { canvas };
    self.area = () => ({ left: LEFT, top: TOP, width: Math.max(10, box.clientWidth - LEFT - RIGHT), height: height - TOP - BOTTOM });
    self.draw = () => {
      const width = box.clientWidth, dense = window.devicePixelRatio || 1;
      if (!width) return; // inside a closed <details>
      canvas.width = Math.round(width * dense);
      canvas.height = Math.round(height * dense);
      const context = canvas.getContext("2d"), area = self.area();
      context.setTransform(dense, 0, 0, dense, 0, 0);
      context.clearRect(0, 0, width, height);
      context.font = "11px system-ui, sans-serif";
      const x = (at) => area.left + ((at - time.from) / (time.to - time.from)) * area.width;
      timeAxis(context, area, time, x);
      context.save();
      canvas.dataset.marks = String(paint(context, area, x));
      context.restore();
    };
    const at = (event) => {
      const rect = canvas.getBoundingClientRect(), area = self.area();
      const part = Math.min(1, Math.max(0, (event.clientX - rect.left - area.left) / area.width));
      return { time: time.from + part * (time.to - time.from), x: area.left + part * area.width, y: event.clientY - rect.top, area };
    };
    let start = null;
    canvas.addEventListener("pointerdown", (event) => { start = at(event); canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      const now = at(event);
      if (start && Math.abs(now.x - start.x) > 3) {
        Object.assign(range.style, { display: "block", left: `${Math.min(now.x, start.x)}px`, width: `${Math.abs(now.x - start.x)}px` });
      }
      time.charts.forEach((other) => other.cross(now.x));
      const date = new Date((time.began + now.time) * 1000).toISOString();
      const lines = hint(now.time, now.y, now.area);
      tip.textContent = `${date.slice(0, 10)} ${date.slice(11, 19)} UTC, ${elapsed(now.time)} after the start\n${lines}`;
      Object.assign(tip.style, { display: "block" });
      const right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
      tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 14 : event.clientX + 14)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 4))}px`;
    });
    const leave = () => { tip.style.display = "none"; time.charts.forEach((other) => other.cross(null)); };
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("pointerup", (event) => {
      const end = at(event);
      range.style.display = "none";
      if (start && Math.abs(end.x - start.x) > 3) time.show(Math.min(start.time, end.time), Math.max(start.time, end.time));
      start = null;
    });
    canvas.addEventListener("pointercancel", () => { start = null; range.style.display = "none"; leave(); });
    canvas.addEventListener("dblclick", time.all);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const now = at(event).time, factor = event.deltaY > 0 ? 1.25 : 0.8;
      time.show(now - (now - time.from) * factor, now + (time.to - now) * factor);
    }, { passive: false });
    self.cross = (x) => { cross.style.display = x === null ? "none" : "block"; cross.style.left = `${x}px`; };
    time.charts.push(self);
    redraws.push(self.draw);
    return self;
  }

  function timeAxis(context, area, time, x) {
    const span = time.to - time.from, most = Math.max(2, area.width / 90);
    const step = TIME_STEPS.find((candidate) => span / candidate <= most) || span;
    context.fillStyle = colour("--dim");
    context.strokeStyle = colour("--line");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (let unix = Math.ceil((time.began + time.from) / step) * step; unix <= time.began + time.to; unix += step) {
      const at = Math.round(x(unix - time.began)) + 0.5;
      line(context, at, area.top, at, area.top + area.height + 4);
      if (at > area.left + 12 && at < area.left + area.width - 12) context.fillText(clock(unix, step), at, area.top + area.height + 6);
    }
    line(context, area.left, area.top + area.height + 0.5, area.left + area.width, area.top + area.height + 0.5);
  }
  function line(context, fromX, fromY, toX, toY) {
    context.beginPath(); context.moveTo(fromX, fromY); context.lineTo(toX, toY); context.stroke();
  }
  // Grid and numbers of a chart's height; what is painted after it stays inside.
  function valueAxis(context, area, top, unit) {
    const step = niceStep(top, 5);
    context.fillStyle = colour("--dim");
    context.strokeStyle = colour("--line");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value <= top * 1.0001; value += step) {
      const y = Math.round(area.top + area.height * (1 - value / top)) + 0.5;
      line(context, area.left - 3, y, area.left + area.width, y);
      context.fillText(`${shown(value)}${unit}`, area.left - 6, Math.max(y, 7));
    }
    context.beginPath();
    context.rect(area.left, area.top - 2, area.width, area.height + 3);
    context.clip();
  }
  const nextNice = (value) => { const step = niceStep(value || 1, 5); return Math.ceil((value || 1) / step) * step; };

  function legend(holder, names, colours, hidden, changed) {
    const box = holder.appendChild(element("div", "legend"));
    names.forEach((name, place) => {
      const button = box.appendChild(element("button", hidden.has(name) ? "off" : ""));
      const mark = button.appendChild(element("i"));
      mark.style.background = `var(${colours[place]})`;
      button.append(name);
      button.addEventListener("click", () => {
        hidden.has(name) ? hidden.delete(name) : hidden.add(name);
        button.className = hidden.has(name) ? "off" : "";
        changed();
      });
    });
  }

  // Lines over `bins` equal parts of the time. Each of `series` has a name, the variable of its colour, means and, where a bin holds several
  // samples, peaks (`high`).
  // most: the axis ends there; 0: at the highest value. hidden: names that a click shows.
  function lines(holder, time, bins, series, { title, label, unit, most, hidden: quiet }) {
    if (!series.length) return;
    holder.append(element("h3", "", title));
    const names = series.map((one) => one.name), colours = series.map((one) => one.colour);
    const hidden = new Set(quiet.filter((name) => names.includes(name)));
    let drawn;
    const bin = (at) => Math.min(bins - 1, Math.max(0, Math.floor((at / time.seconds) * bins)));
    const paint = (context, area, x) => {
      const from = Math.max(0, bin(time.from) - 1), to = Math.min(bins - 1, bin(time.to) + 1);
      let top = most, marks = 0;
      if (!most) {
        for (const one of series) if (!hidden.has(one.name)) for (let i = from; i <= to; i++) top = Math.max(top, (one.high || one.mean)[i] || 0);
        top = nextNice(top);
      }
      valueAxis(context, area, top, unit);
      const y = (value) => area.top + area.height * (1 - value / top), centre = (i) => x(((i + 0.5) / bins) * time.seconds);
      series.forEach((one, place) => {
        if (hidden.has(one.name)) return;
        const stroke = colour(colours[place]);
        if (one.high) {
          context.fillStyle = stroke;
          context.globalAlpha = 0.18;
          for (let i = from; i <= to; i++) {
            if (one.mean[i] === null) continue;
            const width = Math.max(1, centre(i + 1) - centre(i));
            context.fillRect(centre(i) - width / 2, y(one.high[i]), width, Math.max(0, y(one.mean[i]) - y(one.high[i])));
          }
          context.globalAlpha = 1;
        }
        context.strokeStyle = stroke;
        context.lineWidth = 1.5;
        context.lineJoin = "round";
        context.beginPath();
        let pen = false, gap = 0;
        for (let i = from; i <= to; i++) {
          const value = one.mean[i];
          if (value === null) { gap += 1; if (gap > 3) pen = false; continue; }
          gap = 0;
          pen ? context.lineTo(centre(i), y(value)) : context.moveTo(centre(i), y(value));
          if (!pen) context.lineTo(centre(i) + 0.5, y(value));
          pen = true;
          marks += 1;
        }
        context.stroke();
        context.lineWidth = 1;
      });
      return marks;
    };
    const hint = (at) => {
      const place = bin(at);
      return series.filter((one) => !hidden.has(one.name) && one.mean[place] !== null)
        .map((one) => `${one.name} ${one.mean[place]}${unit}${one.high && one.high[place] > one.mean[place] ? `, peak ${one.high[place]}${unit}` : ""}`).join("\n");
    };
    drawn = chart(holder, time, 190, label, paint, hint);
    legend(holder, names, colours, hidden, () => drawn.draw());
  }

  // Rows of percentages over `bins` equal parts of the time, one byte a cell (half percent; NONE: no sample), as base64; the last
  // `large` of them are drawn apart, and higher.
  function heatMap(holder, time, bins, names, heat, { title, label, large }) {
    const rows = names.length;
    if (!rows) return;
    holder.appendChild(element("h3", "", `${title} `)).append(element("span", "dim", "0 % "), element("span", "ramp"), element("span", "dim", " 100 %"));
    const cells = Uint8Array.from(atob(heat), (letter) => letter.charCodeAt(0));
    const small = rows - large, each = Math.max(3, Math.min(18, Math.floor(420 / rows))), largeEach = Math.max(each, 10);
    const gap = large && small ? 6 : 0, height = small * each + large * largeEach + gap + TOP + BOTTOM;
    const top = (row) => (row < small ? row * each : small * each + gap + (row - small) * largeEach);
    const deep = (row) => (row < small ? each : largeEach);
    const bin = (at) => Math.min(bins - 1, Math.max(0, Math.floor((at / time.seconds) * bins)));
    const paint = (context, area, x) => {
      const dense = window.devicePixelRatio || 1, columns = Math.max(1, Math.round(area.width * dense));
      const low = rgb(colour("--heat-low")), high = rgb(colour("--heat-high")), none = rgb(colour("--none"));
      const image = new ImageData(columns, rows);
      let marks = 0;
      for (let column = 0; column < columns; column++) {
        const from = bin(time.from + (column / columns) * (time.to - time.from));
        const to = Math.max(from, bin(time.from + ((column + 1) / columns) * (time.to - time.from) - 1e-9));
        for (let row = 0; row < rows; row++) {
          let sum = 0, count = 0;
          for (let i = from; i <= to; i++) { const cell = cells[row * bins + i]; if (cell !== NONE) { sum += cell; count += 1; } }
          const pixel = (row * columns + column) * 4, part = count ? sum / count / 200 : 0;
          for (let i = 0; i < 3; i++) image.data[pixel + i] = count ? low[i] + (high[i] - low[i]) * part : none[i];
          image.data[pixel + 3] = 255;
          if (count) marks += 1;
        }
      }
      const layer = document.createElement("canvas");
      layer.width = columns; layer.height = rows;
      layer.getContext("2d").putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      if (small) context.drawImage(layer, 0, 0, columns, small, area.left, area.top, area.width, small * each);
      if (large) context.drawImage(layer, 0, small, columns, large, area.left, area.top + top(small), area.width, large * largeEach);
      context.fillStyle = colour("--dim");
      context.textAlign = "right";
      context.textBaseline = "middle";
      let last = -99;
      names.forEach((name, row) => {
        const y = area.top + top(row) + deep(row) / 2;
        if (y - last >= 11) { context.fillText(name, area.left - 6, y); last = y; }
      });
      return marks;
    };
    const hint = (at, y, area) => {
      const row = names.findIndex((_, index) => y - area.top >= top(index) && y - area.top < top(index) + deep(index));
      const cell = row < 0 ? NONE : cells[row * bins + bin(at)];
      return row < 0 ? "" : `${names[row]} ${cell === NONE ? "not sampled" : `${cell / 2} %`}`;
    };
    chart(holder, time, height, label, paint, hint);
  }

  // A button beside each command that copies it. Where the browser keeps its clipboard from a script, the command is selected instead.
  function copies() {
    document.querySelectorAll(".paste").forEach((part) => {
      const code = part.querySelector("code"), button = part.appendChild(element("button", "", "copy"));
      button.setAttribute("aria-live", "polite");
      button.addEventListener("click", async () => {
        getSelection().selectAllChildren(code);
        let done;
        try { await navigator.clipboard.writeText(code.textContent); done = true; } catch { done = document.execCommand("copy"); }
        button.textContent = done ? "copied" : "selected";
        setTimeout(() => { button.textContent = "copy"; }, 2000);
      });
    });
  }

  function ready() {
    copies();
    const redraw = () => redraws.forEach((draw) => draw());
    let waiting = 0;
    window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    window.addEventListener("beforeprint", () => {
      document.documentElement.classList.add("print");
      document.querySelectorAll("details").forEach((part) => { part.open = true; });
      redraw();
    });
    window.addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); redraw(); });
    redraw();
    document.documentElement.dataset.drawn = "yes";
  }

  return { element, colour, shown, view, chart, valueAxis, nextNice, legend, lines, heatMap, ready };
})();
