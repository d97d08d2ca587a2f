#pragma once

#include "Components/Widget.h"
#include "Types/SlateEnums.h"

class UEditableTextBox : public UWidget {
  public:
    void SetText(FText) {}
    void SetHintText(FText) {}

    TStubDelegate<const FText &, ETextCommit::Type> OnTextCommitted;
};
