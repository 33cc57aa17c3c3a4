// Shift+Enter moves to the next cell, and the browser keeps that cell in place while the output above it grows:
// the top of a tall output leaves the screen. This plugin scrolls back to that top, until the reader scrolls,
// clicks or types. JupyterLab loads it as it loads a built extension: a container with `init` and `get`.
(() => {
  const GAP = 4 // pixels above the cell
  const MOVES = ["wheel", "pointerdown", "touchmove", "keydown"] // from here on the reader decides
  let let_go = () => {}

  // Scroll back if the top of a cell is above the screen: the cell's, or, where it is too tall, its output's.
  const keep_top = (cell, outer) => {
    const output = cell.querySelector(".jp-Cell-outputArea")
    if (!output?.offsetHeight) return
    const screen = outer.getBoundingClientRect()
    const whole = cell.offsetHeight + GAP <= screen.height
    const above = screen.top + GAP - (whole ? cell : output).getBoundingClientRect().top
    if (above > 0) outer.scrollTop -= above
  }

  const follow = (cell, outer) => {
    const resized = new ResizeObserver(() => {
      keep_top(cell, outer)
      // Once more, after the browser has kept the next cell in place.
      requestAnimationFrame(() => keep_top(cell, outer))
    })
    resized.observe(cell)
    let_go = () => {
      resized.disconnect()
      for (const move of MOVES) window.removeEventListener(move, let_go, true)
    }
    for (const move of MOVES) window.addEventListener(move, let_go, true)
  }

  const plugin = {
    id: "three-axes:tops",
    autoStart: true,
    activate: (app) => {
      app.commands.commandExecuted.connect((_, { id }) => {
        if (id != "notebook:run-cell-and-select-next") return
        let_go()
        const notebook = app.shell.currentWidget?.content
        const cell = notebook?.widgets?.[notebook.activeCellIndex - 1]?.node
        const outer = cell?.closest(".jp-WindowedPanel-outer")
        if (outer) follow(cell, outer)
      })
    },
  }
  window._JUPYTERLAB ??= {}
  window._JUPYTERLAB["three-axes"] = { init: () => {}, get: async () => () => plugin }
})()
