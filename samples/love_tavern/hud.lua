-- Draws over the scene, in the scene's units: speech bubbles, the input line, and the slider of the VRAM budget.

local hud = {}

local g = love.graphics
local MIB = 1024 * 1024
local SLIDER = { x = 800, y = 652, w = 440 }
local fonts

function hud.load()
  fonts = { speech = g.newFont(21), line = g.newFont(18), small = g.newFont(14) }
end

-- The last `most` lines of a text, and how wide they are.
local function wrapped(font, text, width, most)
  local _, lines = font:getWrap(text, width)
  while #lines > most do
    table.remove(lines, 1)
  end
  local widest = 0
  for _, line in ipairs(lines) do
    widest = math.max(widest, font:getWidth(line))
  end
  return lines, widest
end

-- A bubble with its lower edge at `bottom`, whose tail ends at the mouth.
local function bubble(text, x, bottom, mouth, width, most, paper)
  local font = fonts.speech
  local lines, widest = wrapped(font, text, width, most)
  local w, h = math.max(widest, 60) + 44, #lines * font:getHeight() + 30
  local y = bottom - h
  local foot = math.max(x + 26, math.min(mouth.x, x + w - 56))
  g.setColor(0, 0, 0, 0.35)
  g.rectangle("fill", x + 4, y + 6, w, h, 18)
  for _, pass in ipairs({ { 3, 0.16, 0.1, 0.06 }, { 0, paper[1], paper[2], paper[3] } }) do
    local grow = pass[1]
    g.setColor(pass[2], pass[3], pass[4])
    g.rectangle("fill", x - grow, y - grow, w + 2 * grow, h + 2 * grow, 18)
    g.polygon("fill", foot - grow, bottom - 4, foot + 30 + grow, bottom - 4, mouth.x, mouth.y + grow)
  end
  g.setColor(0.16, 0.1, 0.06)
  g.setFont(font)
  for number, line in ipairs(lines) do
    g.print(line, x + 22, y + 15 + (number - 1) * font:getHeight())
  end
end

function hud.npc_says(text, mouth)
  bubble(text, 640, 268, mouth, 470, 7, { 1, 0.97, 0.88 })
end

function hud.player_says(text, mouth)
  bubble(text, 60, 330, mouth, 340, 4, { 0.86, 0.9, 0.95 })
end

function hud.banner(text)
  g.setColor(0, 0, 0, 0.72)
  g.rectangle("fill", 0, 300, 1280, 110)
  g.setColor(1, 0.95, 0.85)
  g.setFont(fonts.speech)
  g.printf(text, 140, 322, 1000, "center")
end

-- The input line, with a hint as long as it is empty.
function hud.typed(text, hint)
  g.setColor(0, 0, 0, 0.5)
  g.rectangle("fill", 40, 640, 640, 44, 10)
  g.setFont(fonts.line)
  if text == "" then
    g.setColor(1, 0.95, 0.85, 0.45)
    g.printf(hint, 58, 651, 600)
  else
    g.setColor(1, 0.95, 0.85)
    local shown = text -- of a long line, its end is shown
    while fonts.line:getWidth(shown) > 590 do
      shown = shown:gsub("^[%z\1-\127\194-\244][\128-\191]*", "")
    end
    g.print(shown .. "|", 58, 651)
  end
end

-- `vram` has `floor`, `full`, `wanted`, `used` in bytes and `rate` in tokens a second.
function hud.slider(vram)
  local x, y, w = SLIDER.x, SLIDER.y, SLIDER.w
  local function at(bytes)
    return x + w * math.max(0, math.min(1, bytes / vram.full))
  end
  g.setColor(0, 0, 0, 0.5)
  g.rectangle("fill", x - 24, y - 34, w + 48, 88, 10)
  g.setColor(0.25, 0.18, 0.13)
  g.rectangle("fill", x, y, w, 12, 6)
  g.setColor(0.42, 0.72, 0.45)
  g.rectangle("fill", x, y, math.max(12, at(vram.used) - x), 12, 6)
  g.setColor(0.9, 0.35, 0.25) -- the part below the floor
  g.rectangle("fill", at(vram.floor) - 1, y - 5, 2, 22)
  g.setColor(1, 0.93, 0.75)
  g.circle("fill", at(vram.wanted), y + 6, 11)
  g.setFont(fonts.small)
  g.print(("VRAM budget %d MiB"):format(vram.wanted / MIB), x, y - 26)
  local rate = vram.rate and ("%.0f tokens/s"):format(vram.rate) or ""
  g.printf(rate, x, y - 26, w, "right")
  g.setColor(1, 0.93, 0.75, 0.75)
  g.print(("she holds %d MiB"):format(vram.used / MIB), x, y + 24)
  g.printf(("floor %d MiB, all of it %d MiB"):format(vram.floor / MIB, vram.full / MIB), x, y + 24, w, "right")
end

-- The budget that a click at this place chooses; nil beside the slider.
function hud.slider_at(x, y, vram)
  if math.abs(y - SLIDER.y - 6) < 26 and x > SLIDER.x - 20 and x < SLIDER.x + SLIDER.w + 20 then
    return math.max(0, math.min(1, (x - SLIDER.x) / SLIDER.w)) * vram.full
  end
end

return hud
