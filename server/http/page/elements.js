// Makes elements. Whatever people or models wrote is only ever set as text.

export function make(name, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  fill(element, attributes);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

export function drawn(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(element, attributes);
  element.append(...children);
  return element;
}

function fill(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
}

export function byId(id) {
  return document.getElementById(id);
}

let hiding;

export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => (place.hidden = true), 5000);
}
