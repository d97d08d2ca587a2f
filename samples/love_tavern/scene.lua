-- Draws the Gilded Tankard with LÖVE's primitives, 1280 x 720 units under the caller's transform. It knows nothing of the
-- model: the caller says whether the innkeeper is `talking` (0 to 1) or `thinking`.

local scene = { width = 1280, height = 720 }

local g = love.graphics
local random = love.math.newRandomGenerator(11)
local backdrop, front, lights, glow
local time, embers = 0, {}
local talking, thinking = 0, 0

local MIRA = { x = 560, y = 258 } -- her face

local function rgb(hex, alpha)
  return tonumber(hex:sub(1, 2), 16) / 255, tonumber(hex:sub(3, 4), 16) / 255, tonumber(hex:sub(5, 6), 16) / 255,
    alpha or 1
end

local function color(hex, alpha)
  g.setColor(rgb(hex, alpha))
end

-- A rectangle that goes from one colour at its top to another at its bottom.
local function shade(x, y, w, h, top, bottom)
  local r1, g1, b1, a1 = rgb(top)
  local r2, g2, b2, a2 = rgb(bottom)
  local mesh = g.newMesh({
    { 0, 0, 0, 0, r1, g1, b1, a1 }, { w, 0, 0, 0, r1, g1, b1, a1 },
    { w, h, 0, 0, r2, g2, b2, a2 }, { 0, h, 0, 0, r2, g2, b2, a2 },
  }, "fan", "static")
  g.setColor(1, 1, 1)
  g.draw(mesh, x, y)
end

-- A disc of radius 1, white in the middle and clear at its rim: every light is one of these, stretched and coloured.
local function disc()
  local corners = { { 0, 0, 0, 0, 1, 1, 1, 1 } }
  local rings, steps = 6, 48
  local vertices, map = {}, {}
  vertices[1] = corners[1]
  for ring = 1, rings do
    local radius = ring / rings
    local alpha = (1 - radius) ^ 2
    for step = 0, steps - 1 do
      local angle = step / steps * 2 * math.pi
      vertices[#vertices + 1] = { math.cos(angle) * radius, math.sin(angle) * radius, 0, 0, 1, 1, 1, alpha }
    end
  end
  local function at(ring, step)
    return ring == 0 and 1 or 2 + (ring - 1) * steps + step % steps
  end
  for ring = 1, rings do
    for step = 0, steps - 1 do
      for _, vertex in ipairs({ at(ring - 1, step), at(ring, step), at(ring, step + 1) }) do
        map[#map + 1] = vertex
      end
      if ring > 1 then
        for _, vertex in ipairs({ at(ring - 1, step), at(ring, step + 1), at(ring - 1, step + 1) }) do
          map[#map + 1] = vertex
        end
      end
    end
  end
  local mesh = g.newMesh(vertices, "triangles", "static")
  mesh:setVertexMap(map)
  return mesh
end

local function light(x, y, rx, ry, hex, strength)
  color(hex, strength)
  g.draw(glow, x, y, 0, rx, ry)
end

local function curve(points, steps)
  return love.math.newBezierCurve(points):render(steps or 4)
end

-- ---- what stands still ----------------------------------------------------------------------------------------------

local function draw_wall()
  shade(0, 0, 1280, 600, "4b2f22", "5d3a28")
  local x = 0
  while x < 1280 do
    local w = random:random(46, 72)
    local tone = random:random() * 0.16
    g.setColor(0, 0, 0, tone)
    g.rectangle("fill", x, 0, w, 600)
    g.setColor(1, 0.8, 0.6, 0.05)
    g.rectangle("fill", x + 2, 0, 2, 600)
    g.setColor(0, 0, 0, 0.32)
    g.rectangle("fill", x + w - 2, 0, 2, 600)
    for _ = 1, 5 do -- the grain
      local gx, gy, length = x + random:random(8, w - 8), random:random(0, 520), random:random(30, 130)
      g.setColor(0, 0, 0, 0.1)
      g.setLineWidth(1.5)
      g.line(curve({ gx, gy, gx + random:random(-5, 5), gy + length / 2, gx, gy + length }))
    end
    x = x + w
  end
  -- wainscot, ceiling and beams
  shade(0, 0, 1280, 34, "1d120d", "2f1d14")
  for beam = 0, 4 do
    local bx = 20 + beam * 310
    shade(bx, 0, 34, 58, "2a1a12", "3a2418")
    g.setColor(0, 0, 0, 0.35)
    g.rectangle("fill", bx + 34, 0, 8, 54)
  end
  shade(0, 34, 1280, 20, "3d2619", "2a1911")
  g.setColor(0, 0, 0, 0.25)
  g.rectangle("fill", 0, 54, 1280, 10)
end

local function draw_window(x, y, w, h)
  local function arch(grow)
    g.rectangle("fill", x - grow, y + w / 2, w + 2 * grow, h - w / 2 + grow)
    g.arc("fill", x + w / 2, y + w / 2, w / 2 + grow, -math.pi, 0)
  end
  color("24160f")
  arch(14)
  color("4a2f20")
  arch(9)
  g.stencil(function() arch(0) end, "replace", 1)
  g.setStencilTest("greater", 0)
  shade(x - 2, y - 2, w + 4, h + 4, "101a3c", "3f5288")
  for _ = 1, 34 do
    g.setColor(1, 1, 0.92, 0.35 + random:random() * 0.6)
    g.circle("fill", x + random:random() * w, y + random:random() * h * 0.6, 0.6 + random:random() * 0.9)
  end
  color("f4efd6")
  g.circle("fill", x + w * 0.68, y + h * 0.27, 19)
  color("dcd6b8")
  g.circle("fill", x + w * 0.66, y + h * 0.25, 4)
  g.circle("fill", x + w * 0.71, y + h * 0.31, 3)
  color("26335e")
  g.polygon("fill", x, y + h, x, y + h * 0.68, x + w * 0.2, y + h * 0.52, x + w * 0.38, y + h * 0.7, x + w * 0.6,
    y + h * 0.44, x + w * 0.82, y + h * 0.66, x + w, y + h * 0.56, x + w, y + h)
  color("dfe6f2", 0.8)
  g.polygon("fill", x + w * 0.6, y + h * 0.44, x + w * 0.53, y + h * 0.515, x + w * 0.59, y + h * 0.5, x + w * 0.63,
    y + h * 0.53, x + w * 0.668, y + h * 0.512)
  color("141b34")
  for tree = 0, 9 do
    local tx, th = x + tree * w / 9, 16 + (tree * 7) % 13
    g.polygon("fill", tx - 9, y + h, tx, y + h * 0.84 - th, tx + 9, y + h)
  end
  g.setStencilTest()
  color("3a2418")
  g.rectangle("fill", x + w / 2 - 4, y, 8, h)
  g.rectangle("fill", x, y + h * 0.5, w, 7)
  color("5d3c29")
  g.rectangle("fill", x - 20, y + h + 6, w + 40, 13, 3)
  color("2c1b12")
  g.rectangle("fill", x - 20, y + h + 16, w + 40, 5, 2)
end

local BOTTLES = { "3f6b4a", "7a2f2b", "b07a2e", "2f4f6b", "5a3c6b", "8a8f5a" }

local function draw_shelf(x, y, w)
  local at = x + 12
  while at < x + w - 26 do
    local kind = random:random(5)
    if kind == 1 then -- a mug
      color("a8773f")
      g.rectangle("fill", at, y - 28, 22, 28, 3)
      color("6e4a25")
      g.rectangle("fill", at, y - 22, 22, 3)
      g.rectangle("fill", at, y - 8, 22, 3)
      g.setLineWidth(4)
      g.arc("line", "open", at + 22, y - 15, 8, -1.4, 1.4)
      at = at + 36
    elseif kind == 2 then -- a jar
      color("9c8a72")
      g.rectangle("fill", at, y - 30, 24, 30, 7)
      color("5b4a38")
      g.rectangle("fill", at + 2, y - 35, 20, 7, 2)
      at = at + 30
    else
      local hex, height = BOTTLES[random:random(#BOTTLES)], random:random(36, 52)
      color(hex)
      g.rectangle("fill", at, y - height * 0.66, 16, height * 0.66, 4)
      g.polygon("fill", at, y - height * 0.62, at + 5, y - height * 0.8, at + 11, y - height * 0.8, at + 16,
        y - height * 0.62)
      g.rectangle("fill", at + 5, y - height, 6, height * 0.3)
      color("caa36a")
      g.rectangle("fill", at + 5, y - height - 4, 6, 6, 1)
      color("e8d9b0", 0.8)
      g.rectangle("fill", at + 2, y - height * 0.42, 12, 11)
      g.setColor(1, 1, 1, 0.22)
      g.rectangle("fill", at + 3, y - height * 0.6, 2, height * 0.5)
      at = at + 22
    end
  end
  shade(x, y, w, 12, "8a5a37", "5a3822")
  g.setColor(0, 0, 0, 0.3)
  g.rectangle("fill", x + 4, y + 12, w - 8, 9)
  color("3a2418")
  g.polygon("fill", x + 26, y + 12, x + 36, y + 12, x + 26, y + 30)
  g.polygon("fill", x + w - 26, y + 12, x + w - 36, y + 12, x + w - 26, y + 30)
end

local function draw_stone(x, y, w, h)
  local tone = 0.30 + random:random() * 0.13
  g.setColor(tone, tone * 0.95, tone * 0.9)
  g.rectangle("fill", x + 1.5, y + 1.5, w - 3, h - 3, 6)
  g.setColor(1, 1, 1, 0.05)
  g.rectangle("fill", x + 3, y + 3, w - 6, 4, 3)
  g.setColor(0, 0, 0, 0.16)
  g.rectangle("fill", x + 3, y + h - 8, w - 6, 5, 3)
end

local function draw_fireplace()
  color("211c1a")
  g.rectangle("fill", 22, 190, 306, 430)
  for row = 0, 13 do
    local y, x = 192 + row * 30, 24
    while x < 326 do
      local w = math.min(random:random(38, 66), 326 - x)
      if 326 - x - w < 22 then
        w = 326 - x
      end
      draw_stone(x, y, w, 30)
      x = x + w
    end
  end
  for step = 0, 8 do -- the chimney breast
    local inset = 30 + step * 2.5
    local y = 190 - (step + 1) * 15.2
    for half = 0, 3 do
      local w = (306 - 2 * inset) / 4
      draw_stone(22 + inset + half * w, y, w, 15.2)
    end
  end
  shade(6, 182, 338, 24, "7d5132", "4a2d1b") -- mantel
  g.setColor(0, 0, 0, 0.4)
  g.rectangle("fill", 22, 206, 306, 8)
  -- candlesticks, a plate and a little ship on the mantel
  color("caa45a")
  g.rectangle("fill", 46, 160, 6, 22)
  g.ellipse("fill", 49, 181, 13, 4)
  color("efe6cf")
  g.rectangle("fill", 45, 136, 8, 26)
  color("8fa3ad")
  g.circle("fill", 258, 158, 24)
  color("6c808b")
  g.setLineWidth(3)
  g.circle("line", 258, 158, 16)
  color("6b3f22")
  g.polygon("fill", 128, 168, 206, 168, 194, 182, 142, 182)
  color("e4d5b4")
  g.polygon("fill", 168, 124, 168, 164, 198, 164)
  g.polygon("fill", 164, 132, 164, 164, 140, 164)
  color("3b2416")
  g.rectangle("fill", 165, 120, 3, 48)
  -- the opening
  color("0d0907")
  g.rectangle("fill", 84, 340, 182, 280)
  g.arc("fill", 175, 342, 91, -math.pi, 0)
  color("55504b")
  g.setLineWidth(13)
  g.arc("line", "open", 175, 342, 97, -math.pi, 0)
  for stone = 0, 10 do
    local angle = -math.pi + stone * math.pi / 10
    color("2b2725")
    g.setLineWidth(2)
    g.line(175 + math.cos(angle) * 91, 342 + math.sin(angle) * 91, 175 + math.cos(angle) * 104,
      342 + math.sin(angle) * 104)
  end
end

local function draw_barrel(x, y, w, h)
  for stave = 0, 6 do
    local left, right = stave / 7, (stave + 1) / 7
    local function edge(t, bulge)
      return x + w / 2 + (t - 0.5) * w * bulge
    end
    local tone = 0.75 + 0.25 * math.sin((stave + 0.5) / 7 * math.pi)
    g.setColor(0.47 * tone, 0.29 * tone, 0.17 * tone)
    g.polygon("fill", edge(left, 0.86), y, edge(right, 0.86), y, edge(right, 1.04), y + h / 2, edge(right, 0.86), y + h,
      edge(left, 0.86), y + h, edge(left, 1.04), y + h / 2)
    g.setColor(0, 0, 0, 0.28)
    g.setLineWidth(1.5)
    g.line(edge(right, 0.86), y, edge(right, 1.04), y + h / 2, edge(right, 0.86), y + h)
  end
  for _, t in ipairs({ 0.07, 0.3, 0.68, 0.9 }) do
    local bulge = 0.86 + 0.18 * (1 - math.abs(t - 0.5) * 2)
    color("2c2a2b")
    g.rectangle("fill", x + w / 2 - w * bulge / 2 - 1, y + h * t - 4, w * bulge + 2, 9, 2)
    g.setColor(1, 1, 1, 0.12)
    g.rectangle("fill", x + w / 2 - w * bulge / 2 + w * 0.2, y + h * t - 3, w * 0.24, 3)
  end
end

local function draw_counter()
  color("1b100a")
  g.rectangle("fill", 350, 452, 930, 170)
  shade(352, 474, 928, 150, "6a4128", "3b2315")
  local x = 362
  while x < 1280 do
    g.setColor(0, 0, 0, 0.28)
    g.rectangle("fill", x, 488, 128, 112, 4)
    shade(x + 5, 493, 118, 102, "714629", "4a2c1a")
    g.setColor(1, 0.85, 0.65, 0.07)
    g.rectangle("fill", x + 5, 493, 118, 3)
    g.setColor(0, 0, 0, 0.12)
    for line = 1, 4 do
      local gy = 500 + line * 18
      g.setLineWidth(1.5)
      g.line(curve({ x + 10, gy, x + 50, gy + random:random(-7, 7), x + 118, gy + random:random(-3, 3) }))
    end
    x = x + 144
  end
  shade(338, 446, 942, 15, "b17a48", "94602f")
  shade(338, 461, 942, 14, "7c4d2a", "5a361d")
  g.setColor(1, 0.92, 0.75, 0.25)
  g.rectangle("fill", 338, 446, 942, 2)
  shade(0, 590, 1280, 130, "3a2417", "170d08")
end

local function draw_tankard(x, y, s)
  color("b98a45")
  g.polygon("fill", x - 19 * s, y - 44 * s, x + 19 * s, y - 44 * s, x + 22 * s, y, x - 22 * s, y)
  color("8a602b")
  g.rectangle("fill", x - 21 * s, y - 12 * s, 42 * s, 5 * s)
  g.rectangle("fill", x - 20 * s, y - 36 * s, 40 * s, 5 * s)
  g.setLineWidth(6 * s)
  g.arc("line", "open", x + 21 * s, y - 22 * s, 13 * s, -1.4, 1.4)
  color("fff3d6")
  for bubble = 0, 5 do
    g.circle("fill", x + (-17 + bubble * 7) * s, y - (45 + (bubble % 2) * 4) * s, 7 * s)
  end
  color("fff3d6")
  g.rectangle("fill", x - 18 * s, y - 45 * s, 6 * s, 14 * s, 3)
  g.setColor(1, 1, 1, 0.25)
  g.rectangle("fill", x - 14 * s, y - 30 * s, 4 * s, 22 * s, 2)
end

local function draw_on_counter()
  draw_tankard(410, 447, 1)
  draw_tankard(742, 447, 0.86)
  -- bread on a board
  color("6b4526")
  g.rectangle("fill", 850, 440, 150, 9, 4)
  color("b9793a")
  g.ellipse("fill", 918, 422, 58, 24)
  color("d79a55")
  g.ellipse("fill", 916, 416, 50, 16)
  color("8a5424")
  g.setLineWidth(3)
  for cut = -1, 1 do
    g.line(908 + cut * 26, 424, 922 + cut * 26, 406)
  end
  -- cheese, with the candle behind it
  color("caa45a")
  g.ellipse("fill", 1052, 446, 26, 6)
  g.rectangle("fill", 1048, 424, 8, 20)
  color("f0e7d2")
  g.rectangle("fill", 1043, 380, 18, 46, 3)
  g.ellipse("fill", 1043, 398, 4, 9)
  color("e9bb45")
  g.polygon("fill", 1090, 447, 1152, 447, 1152, 425)
  color("f5d674")
  g.polygon("fill", 1090, 446, 1152, 424, 1140, 418)
  color("c9952c")
  g.circle("fill", 1134, 438, 3.5)
  g.circle("fill", 1146, 434, 2.5)
end

local function draw_board()
  -- tonight's menu, in chalk
  color("4a2e1d")
  g.rectangle("fill", 357, 92, 64, 88, 3)
  color("22302b")
  g.rectangle("fill", 362, 97, 54, 78)
  g.setColor(1, 1, 1, 0.75)
  g.setLineWidth(1.6)
  for line = 0, 3 do
    local y = 114 + line * 15
    g.line(curve({ 368, y, 378, y - 3, 388, y + 3, 396, y }))
    g.line(402, y, 409, y)
  end
end

-- ---- what moves -----------------------------------------------------------------------------------------------------

local function draw_flames()
  color("3a2317")
  for _, log in ipairs({ { 112, 540, -0.12 }, { 176, 548, 0.1 }, { 140, 522, 0.05 } }) do
    g.push()
    g.translate(log[1], log[2])
    g.rotate(log[3])
    color("2c1a10")
    g.rectangle("fill", -14, -10, 92, 22, 10)
    color("54341f")
    g.ellipse("fill", 76, 1, 7, 11)
    g.pop()
  end
  for layer, hex in ipairs({ "c8371b", "f0781e", "ffc247", "fff3b8" }) do
    local size = 1.12 - layer * 0.22
    for tongue = -2, 2 do
      local sway = math.sin(time * (3.1 + tongue * 0.37) + tongue * 1.7 + layer)
      local height = (128 - math.abs(tongue) * 26) * size * (0.86 + 0.16 * math.sin(time * 5.3 + tongue * 2.1 + layer))
      local x, base, w = 175 + tongue * 25 * size, 536, 21 * size + 4
      color(hex, 0.85)
      local tip = { x + sway * 10, base - height }
      local left = curve({ x - w, base, x - w * 1.25, base - height * 0.45, tip[1] - 4, tip[2] + height * 0.3, tip[1],
        tip[2] }, 3)
      local right = curve({ tip[1], tip[2], tip[1] + 6, tip[2] + height * 0.3, x + w * 1.25, base - height * 0.45, x + w,
        base }, 3)
      for index = 3, #right do
        left[#left + 1] = right[index]
      end
      for _, triangle in ipairs(love.math.triangulate(left)) do
        g.polygon("fill", triangle)
      end
    end
  end
  for _, ember in ipairs(embers) do
    color("ffb347", ember.life)
    g.circle("fill", ember.x, ember.y, 1.6)
  end
end

local function draw_flame(x, y, s)
  local sway = math.sin(time * 6 + x) * 1.5 * s
  color("ff9c33", 0.9)
  g.ellipse("fill", x + sway * 0.4, y, 4.2 * s, 9 * s)
  g.polygon("fill", x - 3.4 * s, y - 5 * s, x + 3.4 * s, y - 5 * s, x + sway, y - 18 * s)
  color("fff0b0")
  g.ellipse("fill", x + sway * 0.3, y + 2 * s, 2.3 * s, 5.5 * s)
end

local function draw_lantern(x, y)
  local swing = math.sin(time * 0.9 + x) * 0.035
  g.push()
  g.translate(x, 54)
  g.rotate(swing)
  color("1c1512")
  g.setLineWidth(2.5)
  g.line(0, 0, 0, y - 74)
  g.translate(0, y - 54)
  g.polygon("fill", -17, -14, 17, -14, 9, -25, -9, -25)
  color("ffd27a")
  g.rectangle("fill", -13, -14, 26, 34, 2)
  draw_flame(0, 7, 0.9)
  color("1c1512")
  g.rectangle("fill", -16, 18, 32, 7, 2)
  g.setLineWidth(2.5)
  g.line(-13, -14, -13, 20)
  g.line(13, -14, 13, 20)
  g.pop()
end

local function draw_mira()
  local breath = math.sin(time * 1.6) * 1.6
  local nod = math.sin(time * 7.4) * 2.1 * talking
  local tilt = math.sin(time * 0.8) * 0.02 + thinking * 0.07 + math.sin(time * 3.9) * 0.025 * talking
  local x, y = MIRA.x, MIRA.y
  -- sleeves, bodice and apron
  color("e9dcc4")
  g.polygon("fill", x - 58, y + 76, x - 84, y + 152, x - 66, y + 192, x - 34, y + 180, x - 30, y + 88)
  g.polygon("fill", x + 58, y + 76, x + 86, y + 150, x + 68, y + 192, x + 34, y + 180, x + 30, y + 88)
  g.ellipse("fill", x - 48, y + 86 + breath * 0.4, 30, 24)
  g.ellipse("fill", x + 48, y + 86 + breath * 0.4, 30, 24)
  color("cdbd9f")
  g.setLineWidth(2)
  g.line(curve({ x - 72, y + 104, x - 62, y + 140, x - 66, y + 186 }))
  g.line(curve({ x + 72, y + 104, x + 64, y + 140, x + 68, y + 186 }))
  color("2f5d50")
  g.polygon("fill", x - 44, y + 76 + breath * 0.4, x + 44, y + 76 + breath * 0.4, x + 38, y + 136, x + 58, y + 200,
    x - 58, y + 200, x - 38, y + 136)
  color("264c42")
  g.polygon("fill", x - 44, y + 78, x - 30, y + 78, x - 24, y + 200, x - 58, y + 200, x - 38, y + 136)
  color("f1e7d3")
  g.polygon("fill", x - 26, y + 74 + breath * 0.4, x + 26, y + 74 + breath * 0.4, x + 12, y + 104, x - 12, y + 104)
  color("c9a24c")
  g.setLineWidth(2)
  for lace = 0, 3 do
    g.line(x - 10, y + 108 + lace * 11, x + 10, y + 116 + lace * 11)
    g.line(x + 10, y + 108 + lace * 11, x - 10, y + 116 + lace * 11)
  end
  color("f3ead8")
  g.polygon("fill", x - 30, y + 152, x + 30, y + 152, x + 46, y + 200, x - 46, y + 200)
  color("d9cbb0")
  g.rectangle("fill", x - 36, y + 147, 72, 8, 3)
  -- hands on the counter, one with a cloth
  color("e7b48f")
  g.ellipse("fill", x - 66, y + 190, 17, 11)
  g.ellipse("fill", x + 66, y + 190, 17, 11)
  color("b9c7c9")
  local wipe = math.sin(time * 1.3) * 5 * (1 - talking)
  g.polygon("fill", x + 56 + wipe, y + 198, x + 62 + wipe, y + 186, x + 84 + wipe, y + 183, x + 104 + wipe, y + 190, x + 108 + wipe,
    y + 198)
  -- neck
  color("d9a27d")
  g.polygon("fill", x - 13, y + 34, x + 13, y + 34, x + 18, y + 80, x - 18, y + 80)
  -- head
  g.push()
  g.translate(x, y + 40 + breath * 0.6 + nod)
  g.rotate(tilt)
  g.translate(0, -40)
  color("6d2f18")
  g.circle("fill", 0, -52, 21)
  g.ellipse("fill", 0, -6, 49, 54)
  g.ellipse("fill", -38, 30, 14, 32)
  g.ellipse("fill", 38, 30, 14, 32)
  color("eab991")
  g.ellipse("fill", -40, 6, 7, 10)
  g.ellipse("fill", 40, 6, 7, 10)
  color("c9a24c")
  g.circle("fill", -41, 18, 3)
  g.circle("fill", 41, 18, 3)
  color("f0c29c")
  g.ellipse("fill", 0, 4, 39, 44)
  g.ellipse("fill", 0, 20, 32, 30)
  color("e58f7a", 0.45)
  g.ellipse("fill", -23, 18, 9, 6)
  g.ellipse("fill", 23, 18, 9, 6)
  -- fringe and scarf
  color("7d3a1f")
  g.polygon("fill", curve({ -42, 6, -44, -30, -16, -44, 6, -34 }, 3))
  g.polygon("fill", -42, 4, -40, -26, -12, -38, 8, -36, -10, -20, -30, -12)
  g.polygon("fill", 42, 4, 40, -26, 18, -38, 4, -36, 22, -20, 34, -10)
  color("a63a32")
  g.polygon("fill", -45, -16, -38, -34, -20, -46, 0, -50, 20, -46, 38, -34, 45, -16, 30, -27, 0, -35, -30, -27)
  color("f1d9a0")
  for dot = -2, 2 do
    g.circle("fill", dot * 15, -40 + math.abs(dot) * 4.5, 2.3)
  end
  -- eyes that blink, and look up to think
  local blink = (time % 3.7 < 0.13) and 0.1 or 1
  for side = -1, 1, 2 do
    color("ffffff")
    g.ellipse("fill", side * 15, 4, 7.6, 7.4 * blink)
    if blink == 1 then
      color("4f7a3a")
      g.circle("fill", side * 15 + thinking * 2.5, 4.4 - thinking * 3, 4.3)
      color("1c120c")
      g.circle("fill", side * 15 + thinking * 2.5, 4.4 - thinking * 3, 2.3)
      g.setColor(1, 1, 1, 0.95)
      g.circle("fill", side * 15 + 1.6 + thinking * 2.5, 2.6 - thinking * 3, 1.3)
    end
    color("4c2313")
    g.setLineWidth(2.2)
    g.line(curve({ side * 15 - 8.5, 1.5, side * 15, -6.5 * blink - 1, side * 15 + 8.5, 1.5 }))
    g.setLineWidth(3)
    local lift = -4 * thinking - 1.5 * talking * math.sin(time * 2.3)
    g.line(curve({ side * 15 - 9, -9 + lift + (side > 0 and 0 or 2), side * 15, -14 + lift, side * 15 + 9, -9 + lift
      + (side > 0 and 2 or 0) }))
  end
  color("d99b76")
  g.setLineWidth(2.4)
  g.line(curve({ 1, 6, 6, 16, -1, 17 }))
  local open = talking * (0.35 + 0.65 * math.abs(math.sin(time * 9.1) * math.sin(time * 4.7 + 1)))
  if open > 0.08 then
    color("7c2a26")
    g.ellipse("fill", 0, 28, 10 - open * 2, 2 + open * 8)
    color("ffffff")
    g.rectangle("fill", -5.5, 27 - open * 7.5, 11, 2 + open * 1.6, 1)
    color("d4665c")
    g.ellipse("fill", 0, 30 + open * 4, 5, 1 + open * 3)
  else
    color("b5514a")
    g.setLineWidth(3)
    g.line(curve({ -11, 26, 0, 34, 11, 26 }))
  end
  g.pop()
end

local function draw_traveller()
  -- you, from behind
  local breath = math.sin(time * 1.2) * 1.5
  color("17110f")
  g.polygon("fill", 356, 600, 364, 520, 388, 474, 424, 458 + breath, 462, 474, 488, 520, 500, 600)
  color("1f1714")
  g.polygon("fill", curve({ 384, 486, 378, 388, 424, 372 + breath * 2, 472, 390, 464, 486 }, 4))
  color("2b201b")
  g.polygon("fill", curve({ 396, 470, 392, 400, 424, 386 + breath * 2, 436, 392, 416, 470 }, 4))
  g.setColor(1, 0.62, 0.25, 0.16) -- the fire on the shoulder
  g.setLineWidth(3)
  g.line(curve({ 361, 560, 366, 500, 392, 472, 384, 430, 400, 392 }))
end

-- ---- the outside ----------------------------------------------------------------------------------------------------

-- Draws the static parts once. Call it after the window exists.
function scene.load()
  glow = disc()
  random:setSeed(11)
  backdrop = g.newCanvas(scene.width, scene.height, { msaa = 4 })
  g.setCanvas({ backdrop, stencil = true })
  g.clear(0, 0, 0, 0)
  draw_wall()
  draw_window(930, 96, 170, 210)
  draw_board()
  draw_shelf(438, 158, 246)
  draw_shelf(438, 238, 246)
  draw_shelf(438, 318, 246)
  draw_barrel(1156, 300, 112, 150)
  draw_barrel(790, 330, 96, 120)
  draw_fireplace()
  front = g.newCanvas(scene.width, scene.height, { msaa = 4 })
  g.setCanvas(front)
  g.clear(0, 0, 0, 0)
  draw_counter()
  draw_on_counter()
  g.setCanvas()
  lights = g.newCanvas(scene.width / 4, scene.height / 4)
end

-- `speaks` and `thinks` say what the innkeeper does now; the change is animated.
function scene.update(dt, speaks, thinks)
  time = time + dt
  local soft = math.min(1, dt * 8)
  talking = talking + ((speaks and 1 or 0) - talking) * soft
  thinking = thinking + ((thinks and 1 or 0) - thinking) * soft
  if #embers < 14 and random:random() < dt * 9 then
    embers[#embers + 1] = { x = random:random(130, 220), y = 520, life = 1, drift = random:random() - 0.5 }
  end
  for index = #embers, 1, -1 do
    local ember = embers[index]
    ember.y = ember.y - dt * 90
    ember.x = ember.x + (ember.drift + math.sin(time * 3 + index)) * dt * 16
    ember.life = ember.life - dt * 0.55
    if ember.life <= 0 or ember.y < 330 then
      table.remove(embers, index)
    end
  end
end

-- Fills the light map. Call it outside of any transform, before `draw`.
function scene.light()
  local flicker = 0.9 + 0.06 * math.sin(time * 11) + 0.05 * math.sin(time * 7.3 + 2)
  g.setCanvas(lights)
  g.clear(rgb("4c4150"))
  g.push()
  g.origin()
  g.scale(0.25)
  g.setBlendMode("add")
  light(175, 480, 620, 470, "ff9440", 0.95 * flicker)
  light(175, 500, 260, 260, "ffd080", 0.6 * flicker)
  light(480, 120, 420, 340, "ffc070", 0.55)
  light(790, 120, 420, 340, "ffc070", 0.5)
  light(1052, 372, 360, 270, "ffb060", 0.5 * flicker)
  light(1015, 200, 260, 260, "6080d0", 0.42)
  light(MIRA.x, MIRA.y + 30, 260, 240, "ffe0b8", 0.34)
  g.pop()
  g.setBlendMode("alpha")
  g.setCanvas()
  g.setColor(1, 1, 1)
end

function scene.draw()
  g.setColor(1, 1, 1)
  g.setBlendMode("alpha", "premultiplied")
  g.draw(backdrop)
  g.setBlendMode("alpha")
  draw_flames()
  draw_mira()
  g.setColor(1, 1, 1)
  g.setBlendMode("alpha", "premultiplied")
  g.draw(front)
  g.setBlendMode("alpha")
  draw_lantern(480, 118)
  draw_lantern(790, 112)
  draw_flame(1052, 370, 1)
  draw_flame(49, 128, 0.8)
  draw_traveller()
  g.setBlendMode("multiply", "premultiplied")
  g.setColor(1, 1, 1)
  g.draw(lights, 0, 0, 0, 4)
  g.setBlendMode("add")
  local flicker = 0.9 + 0.1 * math.sin(time * 9)
  light(175, 470, 210, 190, "ff7a20", 0.34 * flicker)
  light(480, 118, 90, 90, "ffb050", 0.5)
  light(790, 112, 90, 90, "ffb050", 0.5)
  light(1052, 366, 80, 80, "ffa040", 0.5 * flicker)
  light(49, 124, 60, 60, "ffa040", 0.45 * flicker)
  g.setBlendMode("alpha")
end

-- The points that the speech bubbles come from.
scene.mouth = { x = MIRA.x + 52, y = MIRA.y + 22 }
scene.you = { x = 424, y = 372 }

return scene
