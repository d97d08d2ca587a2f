#pragma once

#include "Components/Widget.h"

class UWidgetTree : public UObject {
  public:
    template <class T> T *ConstructWidget() { return NewObject<T>(); }

    UWidget *RootWidget = nullptr;
};
