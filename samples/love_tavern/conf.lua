function love.conf(t)
  t.identity = "frameshard-tavern"
  t.version = "11.4"
  t.window.title = "The Gilded Tankard"
  t.window.width, t.window.height = 1280, 720
  t.window.resizable = true
  t.window.msaa = 4
  t.modules.audio, t.modules.sound, t.modules.joystick, t.modules.physics, t.modules.video = false, false, false, false, false
end
