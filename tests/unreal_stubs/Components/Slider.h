#pragma once

#include "Components/Widget.h"

class USlider : public UWidget {
  public:
    void SetValue(float) {}

    TStubDelegate<float> OnValueChanged;
};
