## Mira, the innkeeper, is a language model beside the game. Type something to her, and move the slider while she answers:
## it sets the model's VRAM budget.
##
##     godot --path samples/godot_tavern -- MODEL.gguf [--device emulated] [--python PATH] [--unattended]
##
## Unattended, two lines are asked and the slider moves down during the first answer and up during the second. The exit
## status is 1 if an answer is missing or the budget did not change both ways.
extends Node2D

const LINES: Array[String] = ["Good evening! What is for supper?", "Then I will need a room for the night."]

var unattended := false
var answers := 0
var shrinks := 0
var grows := 0
var budget_mb := 0.0

@onready var sidecar: FrameshardSidecar = $Sidecar
@onready var mira: FrameshardNpc = $Mira
@onready var answer: Label = $Screen/Answer
@onready var question: LineEdit = $Screen/Question
@onready var vram: Label = $Screen/Vram
@onready var budget: HSlider = $Screen/Budget


func _ready() -> void:
	read_arguments()
	sidecar.model_ready.connect(_on_model_ready)
	sidecar.budget_released.connect(_on_budget_released)
	sidecar.error_raised.connect(_on_error_raised)
	mira.error_raised.connect(_on_error_raised)
	mira.response_updated.connect(_on_response_updated)
	mira.response_finished.connect(func(_text: String) -> void: answers += 1)
	question.text_submitted.connect(ask)
	budget.drag_ended.connect(func(_changed: bool) -> void: sidecar.vram_budget_mb = budget.value)
	if sidecar.model.is_empty():
		_on_error_raised("usage", "godot --path samples/godot_tavern -- MODEL.gguf [--device NAME] [--python PATH]")
		return
	sidecar.launch()


func read_arguments() -> void:
	var arguments := OS.get_cmdline_user_args()
	var at := 0
	while at < arguments.size():
		match arguments[at]:
			"--unattended":
				unattended = true
			"--device":
				at += 1
				sidecar.device = arguments[at]
			"--python":
				at += 1
				sidecar.python = arguments[at]
			_:
				sidecar.model = arguments[at]
		at += 1


func ask(text: String) -> void:
	answer.text = "You: %s\n\nMira: " % text
	question.clear()
	mira.ask(text)


func _on_model_ready(model: String, floor_mb: float, full_mb: float) -> void:
	answer.text = "Mira is at the bar."
	vram.text = "%s: %d MiB of VRAM" % [model, full_mb]
	budget.min_value = floor_mb
	budget.max_value = full_mb
	budget.value = full_mb
	budget.editable = true
	budget_mb = full_mb
	if unattended:
		play()


func _on_response_updated(delta: String) -> void:
	answer.text += delta


func _on_budget_released(now_mb: float, used_mb: float) -> void:
	if mira.is_speaking():
		shrinks += 1 if now_mb < budget_mb else 0
		grows += 1 if now_mb > budget_mb else 0
	budget_mb = now_mb
	vram.text = "VRAM: %d of %d MiB" % [used_mb, now_mb]


func _on_error_raised(error: String, message: String) -> void:
	answer.text = "%s: %s" % [error, message]
	printerr(answer.text)
	if unattended or error == "usage":
		get_tree().quit(1)


func play() -> void:
	for budget_of_line: float in [budget.min_value + (budget.max_value - budget.min_value) / 4, budget.max_value]:
		ask(LINES[answers])
		await mira.response_updated
		sidecar.vram_budget_mb = budget_of_line
		await mira.response_finished
	print("%d answers; %d shrinks and %d grows while she spoke" % [answers, shrinks, grows])
	get_tree().quit(0 if answers == 2 and shrinks > 0 and grows > 0 else 1)


func _draw() -> void:
	draw_rect(Rect2(0, 0, 960, 540), Color("2b1d14"))
	draw_rect(Rect2(0, 430, 960, 110), Color("4a3020"))
	draw_circle(Vector2(760, 70), 26, Color("ffd27a"))
	draw_rect(Rect2(610, 320, 330, 130), Color("7a4a26"))
	draw_rect(Rect2(600, 305, 350, 18), Color("94602f"))
	draw_circle(Vector2(775, 190), 42, Color("e8b996"))
	draw_rect(Rect2(728, 228, 94, 80), Color("8a2f2f"))
	draw_arc(Vector2(775, 186), 44, PI, TAU, 24, Color("5a2d14"), 16)
