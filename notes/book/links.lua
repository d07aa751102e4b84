-- links.lua: pandoc's filter for a page of the book (notes/book/book.sh). Links between files of the repository become
-- links between pages of the site, pictures load from the site, headings link to themselves, and tables and pictures
-- that are wider than a phone scroll in a box of their own.
--
-- Environment: BOOK_PAGE, the page's file in the repository; BOOK_SITE, the file of the site for each file of the
-- repository, "FILE TAB PAGE" a line; BOOK_SECTIONS, a file to which the page's sections are written.
--
-- A link to a file that is not in BOOK_SITE ends pandoc with an error that names both.

local page = os.getenv("BOOK_PAGE")
local folder = page:match("^(.*/)") or ""

local site = {}
for row in io.lines(os.getenv("BOOK_SITE")) do
    local file, place = row:match("^(.-)\t(.*)$")
    site[file] = place
end

-- The path from the repository's root of `path`, as it stands in a file of `folder`; nil outside the repository.
local function from_root(path)
    local parts = {}
    for part in (folder .. path):gmatch("[^/]+") do
        if part == ".." then
            if #parts == 0 then return nil end
            table.remove(parts)
        elseif part ~= "." then
            table.insert(parts, part)
        end
    end
    return table.concat(parts, "/")
end

-- The way back from the page to the root of the site.
local up = site[page]:gsub("[^/]+", ".."):gsub("%.%.$", "")

local function target_of(target)
    if target:match("^%a[%w+.-]*:") or target:match("^#") then return target end
    local path, anchor = target:match("^([^#]*)(.*)$")
    local file = from_root(path)
    if not file or not site[file] then error(page .. ": links to " .. target .. ", which is no file of the book") end
    return up .. site[file] .. anchor
end

local function raw(text)
    return pandoc.RawBlock("html", text)
end

function Link(link)
    link.target = target_of(link.target)
    return link
end

-- A picture leads to its file, which a reader can enlarge.
function Image(image)
    image.src = target_of(image.src)
    return pandoc.Link({image}, image.src, "", {class = "picture"})
end

-- Below these pictures, a page of the site that is not in the repository.
local beside = {
    ["notes/07-schedules.svg"] = {"explorer.html", "The same for other sizes"},
    ["notes/10-grid.svg"] = {"trace.html", "Steps of two ranks, operation by operation"},
}

function Para(paragraph)
    local link = paragraph.content[1]
    if #paragraph.content ~= 1 or link.t ~= "Link" or link.content[1].t ~= "Image" then return end
    for picture, more in pairs(beside) do
        if link.target == up .. picture then
            return {paragraph, pandoc.Para({pandoc.Link(more[2], up .. more[1]), pandoc.Str(".")})}
        end
    end
end

function Table(t)
    return {raw('<div class="wide">'), t, raw("</div>")}
end

-- Comments are for the tests of the notes.
function RawBlock(block)
    if block.format == "html" and block.text:match("^%s*<!%-%-") then return {} end
end

function RawInline(inline)
    if inline.format == "html" and inline.text:match("^%s*<!%-%-") then return {} end
end

local sections = {}

function Header(header)
    local text = pandoc.utils.stringify(header)
    if header.level == 2 then table.insert(sections, header.identifier .. "\t" .. text) end
    if header.level > 1 then
        header.content:insert(pandoc.Space())
        header.content:insert(pandoc.Link("#", "#" .. header.identifier, "", {class = "anchor", title = text}))
    end
    return header
end

function Pandoc(document)
    local file = assert(io.open(os.getenv("BOOK_SECTIONS"), "w"))
    for _, section in ipairs(sections) do file:write(section, "\n") end
    file:close()
    return document
end
