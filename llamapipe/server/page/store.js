// What survives a reload of this tab. Other tabs do not see it, and it ends with the tab.

export function stored(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;  // the browser keeps nothing for this page, or not what we wrote
  }
}

// False if the browser does not keep it: it is too long, or storage is turned off. An older value is removed then.
export function store(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    try {
      sessionStorage.removeItem(name);
    } catch { /* storage is turned off */ }
    return false;
  }
}
