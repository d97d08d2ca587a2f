#include "engine.h"

#include <cstring>
#include <map>
#include <memory>
#include <utility>

namespace engine {
namespace {

/* The functions that are used, by their names in the interface. */
#define FUNCTIONS(X)                                                                                                   \
    X(string_name_new_with_utf8_chars, GDExtensionInterfaceStringNameNewWithUtf8Chars)                                 \
    X(string_new_with_utf8_chars_and_len, GDExtensionInterfaceStringNewWithUtf8CharsAndLen)                            \
    X(string_to_utf8_chars, GDExtensionInterfaceStringToUtf8Chars)                                                     \
    X(variant_new_nil, GDExtensionInterfaceVariantNewNil)                                                              \
    X(variant_new_copy, GDExtensionInterfaceVariantNewCopy)                                                            \
    X(variant_destroy, GDExtensionInterfaceVariantDestroy)                                                             \
    X(variant_call, GDExtensionInterfaceVariantCall)                                                                   \
    X(variant_get_type, GDExtensionInterfaceVariantGetType)                                                            \
    X(variant_can_convert_strict, GDExtensionInterfaceVariantCanConvertStrict)                                         \
    X(get_variant_from_type_constructor, GDExtensionInterfaceGetVariantFromTypeConstructor)                            \
    X(get_variant_to_type_constructor, GDExtensionInterfaceGetVariantToTypeConstructor)                                \
    X(variant_get_ptr_constructor, GDExtensionInterfaceVariantGetPtrConstructor)                                       \
    X(variant_get_ptr_destructor, GDExtensionInterfaceVariantGetPtrDestructor)                                         \
    X(packed_byte_array_operator_index, GDExtensionInterfacePackedByteArrayOperatorIndex)                              \
    X(global_get_singleton, GDExtensionInterfaceGlobalGetSingleton)                                                    \
    X(print_warning, GDExtensionInterfacePrintWarning)                                                                 \
    X(object_set_instance, GDExtensionInterfaceObjectSetInstance)                                                      \
    X(object_set_instance_binding, GDExtensionInterfaceObjectSetInstanceBinding)                                       \
    X(object_get_instance_binding, GDExtensionInterfaceObjectGetInstanceBinding)                                       \
    X(classdb_construct_object, GDExtensionInterfaceClassdbConstructObject)                                            \
    X(classdb_register_extension_class3, GDExtensionInterfaceClassdbRegisterExtensionClass3)                           \
    X(classdb_register_extension_class_method, GDExtensionInterfaceClassdbRegisterExtensionClassMethod)                \
    X(classdb_register_extension_class_property, GDExtensionInterfaceClassdbRegisterExtensionClassProperty)            \
    X(classdb_register_extension_class_signal, GDExtensionInterfaceClassdbRegisterExtensionClassSignal)                \
    X(classdb_unregister_extension_class, GDExtensionInterfaceClassdbUnregisterExtensionClass)

#define DECLARE(name, type) type name;
struct {
    FUNCTIONS(DECLARE)
} api;
#undef DECLARE
GDExtensionClassLibraryPtr library;

constexpr uint32_t STORED_AND_EDITED = 2 | 4; // PROPERTY_USAGE_STORAGE, PROPERTY_USAGE_EDITOR

/* A typed value of the engine that is a pointer: String, StringName, PackedStringArray and PackedByteArray. */
class Typed {
  public:
    explicit Typed(GDExtensionVariantType type) : type_(type) {
        api.variant_get_ptr_constructor(type, 0)(held_, nullptr);
    }
    Typed(std::string_view text) : type_(GDEXTENSION_VARIANT_TYPE_STRING) {
        api.string_new_with_utf8_chars_and_len(held_, text.data(), GDExtensionInt(text.size()));
    }
    Typed(GDExtensionVariantType type, const void *variant) : Typed(type) {
        api.variant_get_ptr_destructor(type)(held_);
        api.get_variant_to_type_constructor(type)(held_, const_cast<void *>(variant));
    }
    ~Typed() { api.variant_get_ptr_destructor(type_)(held_); }
    Typed(const Typed &) = delete;
    Typed &operator=(const Typed &) = delete;
    void *get() { return held_; }

  private:
    GDExtensionVariantType type_;
    alignas(8) unsigned char held_[16] = {};
};

/* Kept for the whole run, because the engine may ask at any time. */
template <class T> T &keep(T *made) {
    static std::vector<std::shared_ptr<void>> kept;
    kept.push_back(std::shared_ptr<T>(made));
    return *made;
}

/* A PropertyInfo with the texts that it points to. */
struct Property {
    Property(const char *name_, GDExtensionVariantType type, int hint = 0, const char *hint_text_ = "")
        : name(name_), type_name(""), hint_text(hint_text_) {
        info = {type, name.get(), type_name.get(), uint32_t(hint), hint_text.get(), STORED_AND_EDITED};
    }
    Name name, type_name;
    Typed hint_text;
    GDExtensionPropertyInfo info;
};

GDExtensionObjectPtr create_instance(void *data) {
    const auto *type = static_cast<const Class *>(data);
    GDExtensionObjectPtr object = api.classdb_construct_object(Name("Node").get());
    void *instance = type->create(object);
    api.object_set_instance(object, Name(type->name).get(), instance);
    static constexpr GDExtensionInstanceBindingCallbacks none = {nullptr, nullptr, nullptr};
    api.object_set_instance_binding(object, library, instance, &none);
    return object;
}

void free_instance(void *data, GDExtensionClassInstancePtr instance) {
    static_cast<const Class *>(data)->destroy(instance);
}

/* The engine asks once for each virtual method of Node. */
void *virtual_method(void *data, GDExtensionConstStringNamePtr name) {
    const auto *type = static_cast<const Class *>(data);
    if (Name("_enter_tree").is(name)) {
        return reinterpret_cast<void *>(type->enter_tree);
    }
    return Name("_process").is(name) ? reinterpret_cast<void *>(type->process) : nullptr;
}

void call_virtual(GDExtensionClassInstancePtr instance, GDExtensionConstStringNamePtr, void *method,
                  const GDExtensionConstTypePtr *, GDExtensionTypePtr) {
    reinterpret_cast<void (*)(void *)>(method)(instance);
}

void call(void *data, GDExtensionClassInstancePtr instance, const GDExtensionConstVariantPtr *arguments,
          GDExtensionInt count, GDExtensionVariantPtr result, GDExtensionCallError *error) {
    const auto *method = static_cast<const Method *>(data);
    const auto wanted = GDExtensionInt(method->arguments.size());
    if (count != wanted) {
        error->error =
            count < wanted ? GDEXTENSION_CALL_ERROR_TOO_FEW_ARGUMENTS : GDEXTENSION_CALL_ERROR_TOO_MANY_ARGUMENTS;
        error->expected = int32_t(wanted);
        return;
    }
    std::vector<Value> values;
    for (GDExtensionInt i = 0; i < count; ++i) {
        const GDExtensionVariantType type = method->arguments[size_t(i)].type;
        if (!api.variant_can_convert_strict(api.variant_get_type(arguments[i]), type)) {
            error->error = GDEXTENSION_CALL_ERROR_INVALID_ARGUMENT;
            error->argument = int32_t(i);
            error->expected = int32_t(type);
            return;
        }
        values.push_back(Value::copy(arguments[i]));
    }
    error->error = GDEXTENSION_CALL_OK;
    Value returned = method->call(instance, method->data, values);
    api.variant_destroy(result);
    api.variant_new_copy(result, returned.get());
}

void call_typed(void *data, GDExtensionClassInstancePtr instance, const GDExtensionConstTypePtr *arguments,
                GDExtensionTypePtr result) {
    const auto *method = static_cast<const Method *>(data);
    std::vector<Value> values;
    for (const Argument &argument : method->arguments) {
        values.push_back(Value::of(argument.type, arguments[values.size()]));
    }
    Value returned = method->call(instance, method->data, values);
    if (method->result != GDEXTENSION_VARIANT_TYPE_NIL) {
        returned.store(method->result, result);
    }
}

} // namespace

bool load(GDExtensionInterfaceGetProcAddress get, GDExtensionClassLibraryPtr library_) {
    library = library_;
    bool found = true;
#define FIND(name, type)                                                                                               \
    api.name = reinterpret_cast<type>(reinterpret_cast<void *>(get(#name)));                                           \
    found = found && api.name != nullptr;
    FUNCTIONS(FIND)
#undef FIND
    return found;
}

Name::Name(const char *text) { api.string_name_new_with_utf8_chars(&held_, text); }
Name::~Name() { api.variant_get_ptr_destructor(GDEXTENSION_VARIANT_TYPE_STRING_NAME)(&held_); }

template <class Raw> void Value::make(GDExtensionVariantType type, Raw raw) {
    api.get_variant_from_type_constructor(type)(held_, &raw);
}

template <class Raw> Raw Value::raw(GDExtensionVariantType type) const {
    Raw found{};
    store(type, &found);
    return found;
}

Value::Value() { api.variant_new_nil(held_); }
Value::Value(bool value) { make(GDEXTENSION_VARIANT_TYPE_BOOL, GDExtensionBool(value)); }
Value::Value(int64_t value) { make(GDEXTENSION_VARIANT_TYPE_INT, value); }
Value::Value(double value) { make(GDEXTENSION_VARIANT_TYPE_FLOAT, value); }
Value::Value(GDExtensionObjectPtr object) { make(GDEXTENSION_VARIANT_TYPE_OBJECT, object); }

Value::Value(std::string_view text) {
    Typed typed(text);
    api.get_variant_from_type_constructor(GDEXTENSION_VARIANT_TYPE_STRING)(held_, typed.get());
}

Value::Value(const std::vector<std::string> &texts) {
    Typed typed(GDEXTENSION_VARIANT_TYPE_PACKED_STRING_ARRAY);
    api.get_variant_from_type_constructor(GDEXTENSION_VARIANT_TYPE_PACKED_STRING_ARRAY)(held_, typed.get());
    for (const std::string &text : texts) {
        call("append", {Value(std::string_view(text))});
    }
}

Value::Value(const Value &other) { api.variant_new_copy(held_, other.held_); }

Value &Value::operator=(const Value &other) {
    if (this != &other) {
        api.variant_destroy(held_);
        api.variant_new_copy(held_, other.held_);
    }
    return *this;
}

Value::~Value() { api.variant_destroy(held_); }

Value Value::of(GDExtensionVariantType type, GDExtensionConstTypePtr typed) {
    Value made;
    api.variant_destroy(made.held_);
    api.get_variant_from_type_constructor(type)(made.held_, const_cast<void *>(typed));
    return made;
}

Value Value::copy(GDExtensionConstVariantPtr other) {
    Value made;
    api.variant_destroy(made.held_);
    api.variant_new_copy(made.held_, other);
    return made;
}

Value Value::bytes(const void *data, uint64_t size) {
    Typed empty(GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY);
    Value room = of(GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY, empty.get());
    if (size == 0) {
        return room;
    }
    room.call("resize", {Value(int64_t(size))});
    Typed filled(GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY, room.held_);
    std::memcpy(api.packed_byte_array_operator_index(filled.get(), 0), data, size_t(size));
    return of(GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY, filled.get());
}

bool Value::boolean() const { return raw<GDExtensionBool>(GDEXTENSION_VARIANT_TYPE_BOOL) != 0; }
int64_t Value::integer() const { return raw<int64_t>(GDEXTENSION_VARIANT_TYPE_INT); }
double Value::number() const { return raw<double>(GDEXTENSION_VARIANT_TYPE_FLOAT); }
GDExtensionObjectPtr Value::object() const { return raw<GDExtensionObjectPtr>(GDEXTENSION_VARIANT_TYPE_OBJECT); }

std::string Value::text() const {
    Typed typed(GDEXTENSION_VARIANT_TYPE_STRING, held_);
    const GDExtensionInt length = api.string_to_utf8_chars(typed.get(), nullptr, 0);
    std::string found(size_t(length), '\0');
    api.string_to_utf8_chars(typed.get(), found.data(), length);
    return found;
}

std::vector<std::string> Value::texts() const {
    std::vector<std::string> found;
    const int64_t count = call("size").integer();
    for (int64_t i = 0; i < count; ++i) {
        found.push_back(call("get", {Value(i)}).text());
    }
    return found;
}

std::vector<uint8_t> Value::bytes() const {
    std::vector<uint8_t> found(size_t(call("size").integer()));
    if (!found.empty()) {
        Typed typed(GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY, held_);
        std::memcpy(found.data(), api.packed_byte_array_operator_index(typed.get(), 0), found.size());
    }
    return found;
}

Value Value::call(const char *method, const std::vector<Value> &arguments) const {
    std::vector<GDExtensionConstVariantPtr> given;
    for (const Value &argument : arguments) {
        given.push_back(argument.held_);
    }
    Value result;
    api.variant_destroy(result.held_);
    GDExtensionCallError error{};
    api.variant_call(const_cast<unsigned char *>(held_), Name(method).get(), given.data(), GDExtensionInt(given.size()),
                     result.held_, &error);
    if (error.error != GDEXTENSION_CALL_OK) {
        api.variant_new_nil(result.held_);
    }
    return result;
}

void Value::store(GDExtensionVariantType type, GDExtensionTypePtr typed) const {
    if (auto destroy = api.variant_get_ptr_destructor(type)) {
        destroy(typed); // the engine makes the new value in memory that it takes for raw
    }
    api.get_variant_to_type_constructor(type)(typed, const_cast<unsigned char *>(held_));
}

void Later::add(const char *signal, std::vector<Value> arguments) {
    arguments.insert(arguments.begin(), Value(signal));
    calls_->push_back(std::move(arguments));
}

void Later::emit(const Value &node) {
    const Value emitter = node; // a listener may free the node, and this object with it
    const std::weak_ptr<Calls> alive = calls_;
    const Calls due = std::exchange(*calls_, {});
    for (const std::vector<Value> &call : due) {
        if (!alive.expired()) {
            emitter.call("emit_signal", call);
        }
    }
}

Value singleton(const char *name) { return Value(api.global_get_singleton(Name(name).get())); }

void warn(const std::string &message) { api.print_warning(message.c_str(), "frameshard", __FILE__, __LINE__, 1); }

void add(const Class &type) {
    GDExtensionClassCreationInfo3 info{};
    info.is_exposed = 1;
    info.is_runtime = 1;
    info.create_instance_func = create_instance;
    info.free_instance_func = free_instance;
    info.get_virtual_call_data_func = virtual_method;
    info.call_virtual_with_data_func = call_virtual;
    info.class_userdata = const_cast<Class *>(&type);
    api.classdb_register_extension_class3(library, Name(type.name).get(), Name("Node").get(), &info);
}

void add(const Class &type, const Method &given) {
    const Method &method = keep(new Method(given));
    std::vector<std::unique_ptr<Property>> kept;
    std::vector<GDExtensionPropertyInfo> arguments;
    for (const Argument &argument : method.arguments) {
        kept.push_back(std::make_unique<Property>(argument.name, argument.type));
        arguments.push_back(kept.back()->info);
    }
    std::vector<GDExtensionClassMethodArgumentMetadata> metadata(arguments.size(),
                                                                 GDEXTENSION_METHOD_ARGUMENT_METADATA_NONE);
    Property result("", method.result);
    Name name(method.name.c_str());
    GDExtensionClassMethodInfo info{};
    info.name = name.get();
    info.method_userdata = const_cast<Method *>(&method);
    info.call_func = call;
    info.ptrcall_func = call_typed;
    info.method_flags = GDEXTENSION_METHOD_FLAGS_DEFAULT;
    info.has_return_value = method.result != GDEXTENSION_VARIANT_TYPE_NIL;
    info.return_value_info = &result.info;
    info.argument_count = uint32_t(arguments.size());
    info.arguments_info = arguments.data();
    info.arguments_metadata = metadata.data();
    api.classdb_register_extension_class_method(library, Name(type.name).get(), &info);
}

void add(const Class &type, const Signal &signal) {
    std::vector<std::unique_ptr<Property>> kept;
    std::vector<GDExtensionPropertyInfo> arguments;
    for (const Argument &argument : signal.arguments) {
        kept.push_back(std::make_unique<Property>(argument.name, argument.type));
        arguments.push_back(kept.back()->info);
    }
    api.classdb_register_extension_class_signal(library, Name(type.name).get(), Name(signal.name).get(),
                                                arguments.data(), GDExtensionInt(arguments.size()));
}

void add_property(const Class &type, const char *name, GDExtensionVariantType kind, int hint, const char *hint_text) {
    Property property(name, kind, hint, hint_text);
    const std::string plain(name);
    api.classdb_register_extension_class_property(library, Name(type.name).get(), &property.info,
                                                  Name(("set_" + plain).c_str()).get(),
                                                  Name(("get_" + plain).c_str()).get());
}

void remove(const Class &type) { api.classdb_unregister_extension_class(library, Name(type.name).get()); }

void *instance_of(GDExtensionObjectPtr object) {
    return object == nullptr ? nullptr : api.object_get_instance_binding(object, library, nullptr);
}

} // namespace engine
