/* The engine's values and classes, on top of the published gdextension_interface.h alone. Valid after engine::load. */
#ifndef FRAMESHARD_GODOT_ENGINE_H
#define FRAMESHARD_GODOT_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gdextension_interface.h>

namespace engine {

/* Finds the engine's functions. Returns false if this version of the engine lacks one. */
bool load(GDExtensionInterfaceGetProcAddress get, GDExtensionClassLibraryPtr library);

/* A StringName. */
class Name {
  public:
    explicit Name(const char *text);
    ~Name();
    Name(const Name &) = delete;
    Name &operator=(const Name &) = delete;
    void *get() { return &held_; }
    /* Equal names are one object in the engine. */
    bool is(GDExtensionConstStringNamePtr other) const { return *static_cast<void *const *>(other) == held_; }

  private:
    void *held_ = nullptr;
};

/* A Variant. */
class Value {
  public:
    Value();
    Value(bool value);
    Value(int64_t value);
    Value(double value);
    Value(std::string_view text);
    Value(const char *text) : Value(std::string_view(text)) {}
    Value(const std::vector<std::string> &texts);
    explicit Value(GDExtensionObjectPtr object);
    Value(const Value &other);
    Value &operator=(const Value &other);
    ~Value();
    /* A copy of the engine's value of this type. */
    static Value of(GDExtensionVariantType type, GDExtensionConstTypePtr typed);
    static Value copy(GDExtensionConstVariantPtr other);
    static Value bytes(const void *data, uint64_t size);

    bool boolean() const;
    int64_t integer() const;
    double number() const;
    std::string text() const;
    std::vector<std::string> texts() const;
    std::vector<uint8_t> bytes() const;
    GDExtensionObjectPtr object() const;

    /* Calls a method of the value. The result is nil if there is no such method. */
    Value call(const char *method, const std::vector<Value> &arguments = {}) const;
    /* Stores the value as `type` at `typed`, which is initialised. */
    void store(GDExtensionVariantType type, GDExtensionTypePtr typed) const;
    void *get() { return held_; }
    const void *get() const { return held_; }

  private:
    template <class Raw> void make(GDExtensionVariantType type, Raw raw);
    template <class Raw> Raw raw(GDExtensionVariantType type) const;

    alignas(8) unsigned char held_[40]; /* 24 bytes; 40 if the engine's reals are doubles */
};

/* Signals that a node emits in its next frame. One that a listener adds waits for the frame after that, so that a listener
 * may try again without end. */
class Later {
  public:
    void add(const char *signal, std::vector<Value> arguments);
    void emit(const Value &node);

  private:
    using Calls = std::vector<std::vector<Value>>; // arguments of emit_signal
    std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

/* One of the engine's singletons. */
Value singleton(const char *name);
/* Prints a warning as the engine does. */
void warn(const std::string &message);

struct Argument {
    const char *name;
    GDExtensionVariantType type;
};

/* A method of a class. `data` is passed on to `call`. */
struct Method {
    std::string name;
    std::vector<Argument> arguments;
    GDExtensionVariantType result = GDEXTENSION_VARIANT_TYPE_NIL;
    Value (*call)(void *instance, const void *data, const std::vector<Value> &arguments) = nullptr;
    const void *data = nullptr;
};

struct Signal {
    const char *name;
    std::vector<Argument> arguments;
};

/* A class that extends Node. In the editor its objects are placeholders: nothing runs there. */
struct Class {
    const char *name;
    void *(*create)(GDExtensionObjectPtr owner);
    void (*destroy)(void *instance);
    void (*enter_tree)(void *instance);
    void (*process)(void *instance); /* NULL: none */
};

void add(const Class &type);
void add(const Class &type, const Method &method);
void add(const Class &type, const Signal &signal);
/* `hint` and `hint_text` as in PropertyInfo: 1 a range, 2 one of some words, 13 a file. */
void add_property(const Class &type, const char *name, GDExtensionVariantType kind, int hint, const char *hint_text);
void remove(const Class &type);
/* The instance behind a node of this extension; NULL for other nodes. */
void *instance_of(GDExtensionObjectPtr object);

} // namespace engine

#endif
