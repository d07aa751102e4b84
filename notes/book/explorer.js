/* explorer.js: draws the pipeline schedule that the controls select. The schedules are those of the program, with their
 * times: notes/draw --schedules, which book.sh puts into the page as JSON. Nothing is simulated here. */
"use strict";

const data = JSON.parse(document.getElementById("schedules").textContent);
const control = id => document.getElementById(id);
const number = id => Number(control(id).value);
const names = {F: "forward", B: "backward", I: "backward of the input", W: "gradients of the weights"};
const lengths = {F: 1, B: 2, I: 1, W: 1};

/* The boxes of a rank, from its list: computations, and waits between them and after the last one. */
function boxesOf(list, span) {
    const boxes = [];
    let now = 0;
    for (const word of list.split(" ")) {
        const wait = word.match(/^(\d+)<(\d+)$/), action = word.match(/^([FBIW])(\d+)([a-z]?)$/);
        const length = wait ? Number(wait[1]) : lengths[action[1]];
        boxes.push(wait ? {kind: "wait", from: now, length, peer: Number(wait[2])} :
                          {kind: action[1], from: now, length, batch: Number(action[2]), chunk: action[3]});
        now += length;
    }
    if (now < span) boxes.push({kind: "wait", from: now, length: span - now, peer: -1});
    return boxes;
}

/* What a rank waits for is what it does next. */
function sentence(boxes, index, rank, unit) {
    const box = boxes[index], time = amount(box.length / unit), units = time + (time === "1" ? " unit" : " units");
    if (box.kind !== "wait") {
        const chunk = box.chunk ? `, virtual stage ${box.chunk}` : "";
        return `Rank ${rank}: ${names[box.kind]} of micro-batch ${box.batch}${chunk}, ` +
            `from ${amount(box.from / unit)} to ${amount((box.from + box.length) / unit)}.`;
    }
    if (box.peer < 0) return `Rank ${rank} is done, and waits ${units} until the step ends.`;
    const next = boxes[index + 1], message = next.kind === "F" ? "activations" : "gradient";
    return `Rank ${rank} waits ${units} for the ${message} of micro-batch ${next.batch} from rank ${box.peer}.`;
}

const amount = value => Number(value.toFixed(2)).toString();
const percent = value => (100 * value).toFixed(1) + "%";

function element(name, attributes, parent) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return parent.appendChild(made);
}

function draw(schedule, chunks) {
    const height = 26, left = 34, drawing = control("drawing"), ranks = schedule.ranks.length;
    const room = Math.max(drawing.clientWidth, 320) - left - 4;
    const unit = Math.max(room / schedule.span, chunks > 1 ? 11 : 9); // as wide as two digits
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("width", left + unit * schedule.span + 4);
    svg.setAttribute("height", height * ranks);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "the schedule, a row for each rank");
    schedule.ranks.forEach((list, rank) => {
        const boxes = boxesOf(list, schedule.span);
        element("text", {x: left - 8, y: height * rank + 17, "text-anchor": "end"}, svg).textContent = rank;
        boxes.forEach((box, index) => {
            const x = left + unit * box.from, width = unit * box.length;
            const shape = element("rect", {class: box.kind, x, y: height * rank, width, height: height - 3}, svg);
            const words = sentence(boxes, index, rank, chunks);
            if (box.chunk) shape.style.fillOpacity = 1 - 0.7 * (box.chunk.charCodeAt(0) - 97) / chunks;
            element("title", {}, shape).textContent = words;
            shape.addEventListener("pointerdown", () => {
                for (const other of svg.querySelectorAll(".chosen")) other.classList.remove("chosen");
                shape.classList.add("chosen");
                control("said").textContent = words;
            });
            if (box.kind === "wait") return;
            const label = element("text", {x: x + width / 2, y: height * rank + 16, "text-anchor": "middle"}, svg);
            label.textContent = box.batch;
        });
    });
    drawing.replaceChildren(svg);
}

/* A row of the table for each rank: its peak of saved activations, its waits, and the messages for which it waits. */
function tabulate(schedule, chunks) {
    const body = control("ranks");
    body.replaceChildren();
    schedule.ranks.forEach((list, rank) => {
        const waits = boxesOf(list, schedule.span).filter(box => box.kind === "wait");
        const total = waits.reduce((sum, box) => sum + box.length, 0), peers = new Map();
        for (const box of waits) peers.set(box.peer, (peers.get(box.peer) || 0) + box.length);
        const parts = [...peers].sort((a, b) => b[1] - a[1])
            .map(([peer, length]) => `${peer < 0 ? "the end" : "rank " + peer}: ${amount(length / chunks)}`);
        const row = body.insertRow();
        for (const text of [rank, amount(schedule.peak[rank] / chunks), amount(total / chunks),
                            percent(total / schedule.span), parts.join(", ") || "nobody"])
            row.insertCell().textContent = text;
    });
}

/* Selects, draws, and shows the numbers. Only the interleaved schedule has several chunks on a rank. */
function show() {
    const kind = control("schedule").value, interleaved = kind === "interleaved";
    const stages = number("stages"), batches = number("batches"), chunks = interleaved ? number("chunks") : 1;
    const schedule = data.schedules[`${kind}/${stages}/${chunks}/${batches}`], drawn = !schedule.error;
    control("chunks").disabled = !interleaved;
    for (const id of ["stages", "batches"]) control(id + "-value").textContent = number(id);
    control("chunks-value").textContent = chunks;
    control("plan").hidden = kind !== "gpipe";
    control("refused").hidden = drawn;
    control("result").hidden = !drawn;
    control("said").textContent = "Select a box for its sentence.";
    if (!drawn) {
        control("refused").textContent = `train says: ${schedule.error}`;
        return;
    }
    const work = 3 * batches, span = schedule.span / chunks;
    control("bubble").textContent = percent(schedule.bubble);
    control("idle").textContent = `${amount(span - work)} of ${amount(span)}`;
    control("peak").textContent = schedule.peak.map(peak => amount(peak / chunks)).join(" ");
    draw(schedule, chunks);
    tabulate(schedule, chunks);
}

for (const id of ["schedule", "stages", "batches", "chunks"]) control(id).addEventListener("input", show);
window.addEventListener("resize", show);
control("stages").max = data.stages, control("batches").max = data.micro_batches, control("chunks").max = data.chunks;
show();
