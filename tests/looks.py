"""What is wrong with how a page looks, measured in a browser: text that is hard to read, cut off, broken, or lies on other text."""

from __future__ import annotations

from tests.browser import Browser

CONTRAST = 4.5
"""Of text, at least: WCAG 2.2, success criterion 1.4.3, https://www.w3.org/TR/WCAG22/#contrast-minimum"""

_FOUND = """
(root => {
  const found = [];
  const shown = element => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && !element.closest("details:not([open]) > :not(summary)");
  const parse = text => { const parts = text.match(/[\\d.]+/g).map(Number); return text.startsWith("color(") ? [...parts.slice(0, 3).map(part => part * 255), parts[3] ?? 1] : [...parts.slice(0, 3), parts[3] ?? 1]; };
  const over = (top, below) => below.slice(0, 3).map((part, at) => top[at] * top[3] + part * (1 - top[3])).concat(1);
  const linear = part => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (one, other) => { const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b); return (high + 0.05) / (low + 0.05); };
  const canvas = parse(getComputedStyle(document.body).backgroundColor)[3] ? parse(getComputedStyle(document.body).backgroundColor) : (matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), canvas);
  };
  const opacity = element => { let all = 1; for (let at = element; at; at = at.parentElement) all *= Number(getComputedStyle(at).opacity); return all; };
  const scrolls = element => { for (let at = element; at && at !== root; at = at.parentElement) if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true; return false; };
  const say = (what, element, text) => found.push(`${what}: ${JSON.stringify(text.trim().slice(0, 80))} in <${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}">`);

  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, svg = element.closest("svg");
    if (!node.data.trim() || element.closest("script, style, title") || !shown(element)) continue;
    const style = getComputedStyle(element);
    let colour = parse(svg ? style.fill : style.color), back = behind(svg || element);
    if (svg) {
      const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
      for (const rect of svg.querySelectorAll("rect")) {
        const its = rect.getBoundingClientRect();
        if (its.left <= x && x <= its.right && its.top <= y && y <= its.bottom && getComputedStyle(rect).fill !== "none") back = over(parse(getComputedStyle(rect).fill), back);
      }
    }
    colour = [...colour.slice(0, 3), colour[3] * opacity(element)];
    const ratio = contrast(over(colour, back), back);
    if (ratio < LEAST) say(`contrast ${ratio.toFixed(1)} of ${style.color}`, element, node.data);
    if (svg) continue;
    const range = document.createRange(), line = at => { range.setStart(node, at); range.setEnd(node, at + 1); return Math.round(range.getBoundingClientRect().top / 4); };
    for (const word of node.data.matchAll(/[^\\s]+/g)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const rects = [...range.getClientRects()];
      if (new Set(rects.map(rect => Math.round(rect.top / 4))).size < 2) continue;
      const block = element.closest("p, li, dd, dt, div, h1, h2, h3, h4, pre, summary, section") || element;
      if (rects.reduce((sum, rect) => sum + rect.width, 0) > block.clientWidth - 40) continue;  // no line is that long
      for (let at = word.index + 1; at < word.index + word[0].length; at++) {
        if (line(at) !== line(at - 1) && /[\\p{L}\\p{N}]/u.test(node.data[at - 1])) { say("broken word", element, word[0]); break; }
      }
    }
  }
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} pixels wide, the screen ${wide}`);
  for (const element of root.querySelectorAll("*")) {
    if (!shown(element) || element.closest("svg") && element.tagName !== "svg") continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > wide + 1 || box.left < -1) && !scrolls(element.parentElement)) say("beyond the screen", element, element.textContent);
    const cut = getComputedStyle(element).overflowX === "hidden" && element.scrollWidth > element.clientWidth + 1;
    if (cut && element.textContent.trim()) say("cut off", element, element.textContent);
  }
  for (const svg of root.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim() && shown(text)), whole = svg.getBoundingClientRect();
    const boxes = texts.map(text => text.getBoundingClientRect());
    boxes.forEach((one, at) => {
      if (one.left < whole.left - 1 || one.right > whole.right + 1 || one.top < whole.top - 1 || one.bottom > whole.bottom + 1) say("outside its picture", texts[at], texts[at].textContent);
      boxes.slice(at + 1).forEach((other, more) => {
        const across = Math.min(one.right, other.right) - Math.max(one.left, other.left), down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (across > 0.5 && down > 1.5) say(`on ${JSON.stringify(texts[at + 1 + more].textContent)}`, texts[at], texts[at].textContent);
      });
    });
  }
  for (const image of root.querySelectorAll("img")) if (!image.complete || !image.naturalWidth) say("not shown", image, image.alt);
  return found;
})
"""


def wrong(browser: Browser, selector: str = "body") -> list[str]:
    """Sentences about what is wrong within an element of the page that is open: contrast below 4.5, words broken in two, text that is cut
    off or lies on other text of a picture, anything beyond the screen that does not scroll, images that are not shown."""
    return browser.value(f"{_FOUND.replace('LEAST', str(CONTRAST))}(document.querySelector({selector!r}))")
