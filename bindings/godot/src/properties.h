/* Properties that are members of a struct of values. */
#ifndef FRAMESHARD_GODOT_PROPERTIES_H
#define FRAMESHARD_GODOT_PROPERTIES_H

#include "engine.h"
#include "options.h"

inline engine::Value read(const Property &property, const void *values) {
    const char *place = static_cast<const char *>(values) + property.offset;
    switch (property.kind) {
    case Kind::text:
        return engine::Value(std::string_view(*reinterpret_cast<const std::string *>(place)));
    case Kind::texts:
        return engine::Value(*reinterpret_cast<const std::vector<std::string> *>(place));
    case Kind::integer:
        return engine::Value(*reinterpret_cast<const int64_t *>(place));
    case Kind::number:
        return engine::Value(*reinterpret_cast<const double *>(place));
    case Kind::boolean:
        break;
    }
    return engine::Value(*reinterpret_cast<const bool *>(place));
}

inline void write(const Property &property, void *values, const engine::Value &value) {
    char *place = static_cast<char *>(values) + property.offset;
    switch (property.kind) {
    case Kind::text:
        *reinterpret_cast<std::string *>(place) = value.text();
        break;
    case Kind::texts:
        *reinterpret_cast<std::vector<std::string> *>(place) = value.texts();
        break;
    case Kind::integer:
        *reinterpret_cast<int64_t *>(place) = value.integer();
        break;
    case Kind::number:
        *reinterpret_cast<double *>(place) = value.number();
        break;
    case Kind::boolean:
        *reinterpret_cast<bool *>(place) = value.boolean();
        break;
    }
}

inline GDExtensionVariantType type_of(Kind kind) {
    switch (kind) {
    case Kind::text:
        return GDEXTENSION_VARIANT_TYPE_STRING;
    case Kind::texts:
        return GDEXTENSION_VARIANT_TYPE_PACKED_STRING_ARRAY;
    case Kind::integer:
        return GDEXTENSION_VARIANT_TYPE_INT;
    case Kind::number:
        return GDEXTENSION_VARIANT_TYPE_FLOAT;
    case Kind::boolean:
        break;
    }
    return GDEXTENSION_VARIANT_TYPE_BOOL;
}

/* Adds a property to a class whose objects have `values` as a public member. */
template <class Node, auto values> void add_property(const engine::Class &type, const Property &property) {
    const std::string name(property.name);
    engine::Method set{"set_" + name, {{"value", type_of(property.kind)}}};
    set.call = [](void *instance, const void *data, const std::vector<engine::Value> &arguments) {
        auto *node = static_cast<Node *>(instance);
        write(*static_cast<const Property *>(data), &(node->*values), arguments[0]);
        node->changed(*static_cast<const Property *>(data));
        return engine::Value();
    };
    set.data = &property;
    engine::Method get{"get_" + name, {}, type_of(property.kind)};
    get.call = [](void *instance, const void *data, const std::vector<engine::Value> &) {
        return read(*static_cast<const Property *>(data), &(static_cast<Node *>(instance)->*values));
    };
    get.data = &property;
    engine::add(type, set);
    engine::add(type, get);
    engine::add_property(type, property.name, type_of(property.kind), property.hint, property.hint_text);
}

#endif
