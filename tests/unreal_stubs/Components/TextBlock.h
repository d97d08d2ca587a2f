#pragma once

#include "Components/Widget.h"

class UTextBlock : public UWidget {
  public:
    void SetText(FText) {}
    void SetAutoWrapText(bool) {}
};
