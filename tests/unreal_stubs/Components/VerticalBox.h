#pragma once

#include "Components/Widget.h"

class UVerticalBoxSlot;

class UVerticalBox : public UWidget {
  public:
    UVerticalBoxSlot *AddChildToVerticalBox(UWidget *) { return nullptr; }
};
