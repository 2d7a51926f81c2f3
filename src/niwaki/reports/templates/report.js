"use strict";
// What a mark says, at the pointer or where it was tapped; the page is complete without it.
const tip = document.getElementById("tip");
const show = (event) => {
  const mark = event.target.closest?.(".chart [aria-roledescription]:not(g)[aria-label]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.getAttribute("aria-label");
  const { clientX: x, clientY: y } = event;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(x + 12, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${y - height - 12 > 8 ? y - height - 12 : y + 16}px`;
};
for (const type of ["pointermove", "pointerdown"]) document.addEventListener(type, show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
// The zoom of masks: the slider, or a click in a picture for the next whole number.
const zoom = document.getElementById("zoom");
const enlarge = () => {
  for (const picture of document.querySelectorAll(".mask img")) {
    picture.style.width = `${picture.naturalWidth * zoom.value}px`;
  }
  zoom.nextElementSibling.value = `${zoom.value} ×`;
};
zoom?.addEventListener("input", enlarge);
for (const frame of document.querySelectorAll(".mask .frame")) {
  frame.addEventListener("click", (event) => {
    const picture = frame.firstElementChild.getBoundingClientRect();
    const across = (event.clientX - picture.left) / picture.width;
    const down = (event.clientY - picture.top) / picture.height;
    zoom.value = zoom.value === zoom.max ? zoom.min : Number(zoom.value) + 1;
    enlarge();
    // What was pointed at stays in the middle.
    frame.scrollLeft = across * frame.scrollWidth - frame.clientWidth / 2;
    frame.scrollTop = down * frame.scrollHeight - frame.clientHeight / 2;
  });
}
