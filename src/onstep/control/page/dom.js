// Small helpers for the document. All text is inserted as text: nothing that a job sends is read as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick` and the like) and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Sets the text of an element only where it differs, so that selections and screen readers are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of a list the nodes of `keys`, in order; nodes that exist are kept, with focus and selection. */
export function keepChildren(parent, keys, make) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = keys.map((key) => {
    const child = known.get(key) ?? make(key);
    child.dataset.key = key;
    return child;
  });
  for (const child of [...parent.children]) if (!wanted.includes(child)) child.remove();
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  return wanted;
}
