#pragma once

#include "Components/Widget.h"

class APlayerController;
class UGameInstance;
class UWidgetTree;
class UClass;

class UUserWidget : public UWidget {
  public:
    using Super = UUserWidget; // for derived classes
    static UClass *StaticClass() { return nullptr; }
    virtual bool Initialize() { return true; }
    void AddToViewport() {}
    UGameInstance *GetGameInstance() const { return nullptr; }

    UWidgetTree *WidgetTree = nullptr;
};
template <class T> T *CreateWidget(APlayerController *, UClass *) { return NewObject<T>(); }
